"""From configuration to a store: which back end it is, and how an engine gets one without ever waiting for it.

`open_store` is the one place that chooses a back end. An adapter knows `Store`, `Space` and what is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.agent.tiered import TieredStore
from store_client.base import Store
from store_client.embedded import EmbeddedStore
from store_client.memory_locks import MemoryLocks
from store_client.sharded import ShardView

_RETRY_S = 10.0
_MOST_VIEWS = 256
"""So many are kept: an instance goes on in a new namespace whenever its weights change."""

logger = get_logger(__name__)


def open_store(config: Config) -> Store:
    """The store that `config` describes: the embedded pool, with tiers behind it where there are any.

    Raises PoolError; the message says what to do.
    """
    started_s = time.monotonic()
    store = EmbeddedStore(config.pool, config.capacity, eviction=config.eviction)
    logger.info("pool %s open after %.3f s", store.path, time.monotonic() - started_s)
    return TieredStore(store, config) if config.tiers or config.agent_http_port else store


def open_in_background(
    config: Config, first: Callable[[], None] | None = None, then: Callable[[Store], None] | None = None
) -> BackgroundStore:
    """The store that `config` describes, or none where it says that there is to be none; see `BackgroundStore`."""
    return BackgroundStore((lambda: open_store(config)) if config.prefix_reuse else None, first, then)


class BackgroundStore:
    """A store that is opened in a thread, absent while it cannot be, and never an exception.

    While it is absent every lookup misses and nothing is saved; opening is tried again from time to time.

    Args:
        open: opens the store; None where there is to be none.
        first: runs once before, in the same thread. Adapters hash the model's weights there. Where it raises, the store
            is not opened.
        then: is given the store once it is open, in the same thread.
    """

    def __init__(
        self,
        open: Callable[[], Store] | None,
        first: Callable[[], None] | None = None,
        then: Callable[[Store], None] | None = None,
    ) -> None:
        self._open = open
        self._first = first
        self._then = then
        self._store: Store | None = None
        self._locks: MemoryLocks | None = None
        self._views: dict[tuple[bytes, Shard], ShardView] = {}
        self._closed = threading.Event()
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-connector-open", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Give the first attempt a moment, so that a small model's very first request is already served."""
        self._tried.wait(timeout_s)

    @property
    def store(self) -> Store | None:
        return self._store

    def take_failures(self) -> Mapping[str, int]:
        """As `Store.take_failures`; none while there is no store."""
        store = self._store
        return {} if store is None else store.take_failures()

    def await_word(self) -> None:
        """As `Store.await_word`."""
        if (store := self._store) is not None:
            store.await_word()

    def lock_memory(self, locks: MemoryLocks) -> None:
        """As `Store.lock_memory`, as soon as there is a store. Called by one thread, always with the same locks."""
        self._locks = locks
        if (store := self._store) is not None:
            store.lock_memory(locks)

    def view(self, namespace: Namespace, shard: Shard, unit_nbytes: int) -> ShardView | None:
        """The pages of one namespace as one rank sees them, or None while there is no store; see `ShardView`."""
        if self._store is None:
            return None
        name = (namespace.digest, shard)
        view = self._views.get(name)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            try:
                view = self._views[name] = ShardView(self._store, namespace, shard, unit_nbytes)
            except Exception as error:
                log_once("pool.view", "the pool cannot be used: %s", error, logger=logger)
        return view

    def close(self) -> None:
        """Release the store; idempotent. One that opens later is released then."""
        self._closed.set()
        self._thread.join(timeout=2.0)
        store, self._store = self._store, None
        self._views.clear()
        if store is not None:
            store.close()

    def _run(self) -> None:
        try:
            if self._first is not None:
                self._first()
            if self._open is not None:
                self._keep_trying(self._open)
        except Exception as error:
            logger.warning("prefix reuse from the pool is off: %s", error)
        self._tried.set()

    def _keep_trying(self, open: Callable[[], Store]) -> None:
        while not self._closed.is_set():
            store = None
            try:
                self._store = store = open()
            except Exception as error:
                said = "no prefix reuse until the pool opens: %s (next try in %d s)"
                log_once(f"pool.open:{kind_of(str(error))}", said, error, _RETRY_S, logger=logger)
            self._tried.set()
            if store is None:
                self._closed.wait(_RETRY_S)
                continue
            if self._closed.is_set():
                store.close()
                return
            if (locks := self._locks) is not None:  # asked for before there was one; twice does no harm
                store.lock_memory(locks)
            if self._then is not None:
                self._then(store)
            return
