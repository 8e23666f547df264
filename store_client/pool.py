"""The pool as an engine sees it: opened in the background, absent while it cannot be, never an exception.

While the pool is absent every lookup misses and nothing is saved; opening is tried again from time to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.base import Shard, Store
from store_client.embedded import EmbeddedStore
from store_client.sharded import ShardView

_RETRY_S = 10.0

logger = get_logger(__name__)


class Pool:
    """One process's access to the pool.

    Args:
        config: names the folder, its capacity and the eviction policy, or says that there is to be no pool.
        prepare: runs before the pool is opened, in the same background thread; its result is kept in `prepared`.
            Adapters hash the model's weights there. An exception ends the use of the pool.
    """

    def __init__(self, config: Config, prepare: Callable[[], Namespace] | None = None) -> None:
        self._config = config
        self._prepare = prepare
        self.prepared: Namespace | None = None
        self._store: Store | None = None
        self._views: dict[tuple[bytes, Shard], ShardView] = {}
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._open, name="mooncake-connector-pool", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Give the first attempt a moment, so that a small model's very first request is already served."""
        self._tried.wait(timeout_s)

    @property
    def store(self) -> Store | None:
        return self._store

    def view(self, namespace: Namespace, shard: Shard, unit_nbytes: int) -> ShardView | None:
        """The pages of one namespace as one rank sees them, or None while the pool is absent; see `ShardView`."""
        if self._store is None:
            return None
        name = (namespace.digest, shard)
        view = self._views.get(name)
        if view is None:
            try:
                view = self._views[name] = ShardView(self._store, namespace, shard, unit_nbytes)
            except Exception as error:
                log_once("pool.view", "the pool cannot be used: %s", error, logger=logger)
        return view

    def close(self) -> None:
        """Release the pool; idempotent."""
        self._closed.set()
        self._thread.join(timeout=2.0)
        store, self._store = self._store, None
        self._views.clear()
        if store is not None:
            store.close()

    def _open(self) -> None:
        try:
            if self._prepare is not None:
                self.prepared = self._prepare()
        except Exception as error:
            logger.warning("prefix reuse from the pool is off: %s", error)
            self._tried.set()
            return
        while self._config.prefix_reuse and not self._closed.is_set() and not self._try():
            self._tried.set()
            self._closed.wait(_RETRY_S)
        self._tried.set()

    def _try(self) -> bool:
        started_s = time.monotonic()
        try:
            store = EmbeddedStore(self._config.pool, self._config.capacity, eviction=self._config.eviction)
        except Exception as error:
            log_once(
                f"pool.open:{kind_of(str(error))}",
                "no prefix reuse until the pool opens: %s (next try in %d s)",
                error,
                _RETRY_S,
                logger=logger,
            )
            return False
        self._store = store
        logger.info("pool %s open after %.3f s", store.path, time.monotonic() - started_s)
        return True
