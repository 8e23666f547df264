"""`MooncakeConnectorStorage`: the pool as the third level of SGLang's HiCache.

A thin map of SGLang's storage interface (0.5.23) to :class:`sglang_backend.stored_pool.StoredPool`. Pages of the
model's own KV cache are canonical, whatever `--hicache-mem-layout`, so that every layout, TP size and engine reads
them; pools beside it (sliding window, Mamba, indexer, draft) are stored as opaque bytes that only the same kind of
instance reads.

Keys are SGLang's page hashes, 64 hex digits. No call raises for a fault of the store: what cannot be had is a miss,
what cannot be stored is reported as not stored.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.errors import ConfigError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once, set_log_level
from mooncake_connector.misses import Miss
from mooncake_connector.threads import done_apart
from sglang_backend import own_settings
from sglang_backend.calls import first_slots, page_keys, parent_key
from sglang_backend.host_pages import CanonicalPages, HostPages, opaque_pages, plain_format
from sglang_backend.identity import WHOLE, identify, of_opaque_pool, opaque_pool
from sglang_backend.metrics import Metrics
from sglang_backend.missed import Missed
from sglang_backend.page_hashes import compile_early
from sglang_backend.plugin import hooked
from sglang_backend.records import Records
from sglang_backend.states import longest, look_for_states, restorable
from sglang_backend.stored_pool import Movers, StoredPool
from sglang_backend.weights import in_memory
from store_client.open import BackgroundStore, open_in_background
from store_client.pool_metrics import PoolMetrics
from store_client.sharded import ShardView

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.observability.metrics_collector import StorageMetrics

_FIRST_WAIT_S = 2.0
"""How long attaching waits for the model's files to be hashed and the pool to open; both go on in the background."""
_CLOSE_S = 5.0
"""How long closing the pool is waited for: others of this process may just open one, on a file system that hangs."""
_CLEAR_S = 2.0
"""How long clearing is waited for: 400,000 pages and more go in that time."""

logger = get_logger(__name__)


def always() -> bool:
    return True


class MooncakeConnectorStorage(HiCacheStorage):
    """See the module.

    Args:
        storage_config: `extra_config` may hold any field of :class:`mooncake_connector.config.schema.Config`.
        kwargs_or_pool: what SGLang's ways of building a backend pass as a second argument; the host pool that counts
            is the one that is registered later.

    Raises ConfigError for a key or value that is not allowed; the text names it.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs_or_pool: dict[str, Any] | HostKVCache | None = None
    ) -> None:
        extra = storage_config.extra_config or {}
        self._given = own_settings(extra)
        self._config: Config = load_config(self._given, os.environ)
        set_log_level(self._config.log_level)
        self._storage_config = storage_config
        self.metrics = Metrics(enabled=storage_config.enable_storage_metrics)
        self.counts_lookups = storage_config.tp_rank == 0 and storage_config.pp_rank == 0
        self.logs_requests = self._config.log_requests and self.counts_lookups
        """See :mod:`sglang_backend.request_lines`."""
        self._pool_metrics = PoolMetrics(self._config) if storage_config.enable_storage_metrics else None
        self._namespace: Namespace | None = None
        self._store: BackgroundStore | None = None
        self._movers = Movers()
        self._kv: StoredPool | None = None
        self._sees_all_ranks = False
        self.missed = Missed()
        self.records = Records(lambda: (self._store, self._kv, self._current_namespace()), self._whole)
        self.loaded_tokens = 0
        """Of prompts, so far."""
        self.last_asked: int | None = None
        self.asked_by: dict[int, int] = {}
        self.question: tuple[Any, int] | None = None
        """See :mod:`sglang_backend.request_lines`."""
        self.wanted: Callable[[], bool] = always
        """Whether SGLang still waits for what it loads now."""
        self.asked: Callable[[], bool] = always
        """Whether it does for the answer to its lookup."""
        self.hurried = False
        """Whether SGLang waits for the thread of its lookups to end, and ends itself where that takes long."""
        self.kept: Callable[[], bool] = always
        """Whether what it saves now is still to be saved."""
        self._others: dict[str, StoredPool] = {}
        self.registered_pools: dict[str, HostKVCache] = {}
        compile_early()

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Take the model's KV host pool, and open the store in the background.

        Raises ConfigError and ModelIdentityError, which fail the attachment with their text.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._check_page_size(mem_pool_host)
        fmt = plain_format(mem_pool_host)
        identity = identify(self._config, self._storage_config, mem_pool_host, fmt)
        self._sees_all_ranks = identity.shard is not None and identity.on_one_host

        def identified() -> None:
            self._namespace = identity.namespace()

        self._store = open_in_background(self._config, identified)
        if mem_pool_host.kv_buffer is not None:  # else all of the model's state is in the other pools
            if fmt is None or identity.shard is None:
                self._kv = self._stored(opaque_pages(mem_pool_host), WHOLE)
            else:
                self._kv = self._stored(CanonicalPages(mem_pool_host, fmt, identity.shard), identity.shard)
        if not hooked():
            logger.warning(
                "SGLang did not load the plugin of mooncake-connector in this process: do not update weights while it "
                "serves, since pages of the old ones would be read for the new ones"
            )
        if identity.own:
            logger.info("pages are shared with SGLang instances of the same settings only: %s", identity.own)
        self._store.wait(_FIRST_WAIT_S)

    @contained(nothing)
    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        self.registered_pools[host_pool_name] = host_pool
        if host_pool is self.mem_pool_host or host_pool_name == PoolName.KV:
            return
        replicated = (
            self._storage_config.is_mla_model
            and host_pool_name != PoolName.MAMBA
            and not isinstance(host_pool, MHATokenToKVPoolHost)
        )
        description = opaque_pool(host_pool_name, self._storage_config, host_pool, replicated=replicated)
        self._others[host_pool_name] = self._stored(opaque_pages(host_pool), WHOLE, description)

    @contained(lambda: False)
    def exists(self, key: str) -> bool:
        return self._kv is not None and self._kv.contains(page_keys([key]))[0]

    @contained(lambda: 0)
    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._hits(keys, extra_info, fetch=True)

    def _hits(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None, *, fetch: bool, wanted: int | None = None
    ) -> int:
        """Leading pages, of so many as are wanted, that are in the pool, or where `fetch` on their way there from a
        tier."""
        if self._kv is None:
            return 0
        found, why = self._kv.prefix(page_keys(keys[:wanted]), parent_key(extra_info), fetch=fetch)
        page_tokens = self._kv.pages.page_slots
        hits = found if found * page_tokens >= (self._config.min_hit_tokens or 0) else 0
        self._missed(why or Miss.GROUPS_DISAGREE, len(keys) - found)  # beyond what was wanted
        self._missed(Miss.BELOW_MIN_HIT, found - hits)
        view = self._kv.view
        if self.counts_lookups and not self.metrics.repeats and view is not None:
            view.record_lookup(hit_pages=hits, missed_pages=len(keys) - hits, page_tokens=page_tokens)
        return hits

    def _missed(self, why: Miss, pages: int) -> None:
        """Count pages of a prompt that were not found or not loaded; what is found counts when it is loaded.

        Of one prompt those further on come first.
        """
        if pages > 0 and self._kv is not None:
            tokens = pages * self._kv.pages.page_slots
            self.missed.note(why, tokens)
            if self.counts_lookups:
                self.metrics.missed(why, tokens)

    @contained(PoolTransferResult.empty)
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        # Where there are states (Mamba, sliding windows), KV that a tier would bring is of no use without them: they
        # are looked for first, and the KV is fetched as far as they go.
        trailing = [one for one in pool_transfers or [] if one.hit_policy == PoolHitPolicy.TRAILING_PAGES]
        asks = bool(self._config.tiers) and threading.current_thread() is not threading.main_thread()
        states = look_for_states(trailing, self._others, page_keys(keys), self._config.lookup_wait_s if asks else None)
        reach = longest(states, trailing) if asks and trailing else 0
        fetch = not trailing or reach > 0
        # Without a buffer of its own, the anchor has what the other pools have.
        kv_pages = len(keys)
        if self._kv is not None or not pool_transfers:
            kv_pages = self._hits(keys, extra_info, fetch=fetch, wanted=reach or len(keys))
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        legal = set(range(1, kv_pages + 1))
        names = page_keys(keys[:kv_pages])
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:  # never decides about the KV pages
                continue
            other = self._others.get(transfer.name)
            if other is None:
                present = [False] * kv_pages
            elif transfer.name in states:
                present = states[transfer.name][:kv_pages]
            elif fetch:
                found = other.prefix(names, parent_key(extra_info)).pages
                present = [True] * found + [False] * (kv_pages - found)
            else:
                present = other.contains(names)
            lengths = restorable(present, transfer)
            if lengths:
                hits[transfer.name] = max(lengths)
            legal &= lengths
        agreed = max(legal, default=0)
        self._missed(Miss.GROUPS_DISAGREE, kv_pages - agreed)
        return PoolTransferResult(agreed, hits, sorted(legal))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._load(self._kv, keys, host_indices) if self._kv is not None else [True] * len(keys)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._save(self._kv, keys, host_indices, extra_info) if self._kv is not None else [True] * len(keys)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._load(self._other(transfer), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            transfer.name: self._save(self._other(transfer), transfer.keys or [], transfer.host_indices, extra_info)
            for transfer in transfers
        }

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill flat pages of SGLang's (`get_dummy_flat_data_page`); None for a page that is not there."""
        targets = list(target_locations or ())
        if len(targets) != len(keys) or not all(isinstance(target, torch.Tensor) for target in targets):
            return [None] * len(keys)
        arrived = self._load_flat(keys, targets)
        return [target if right else None for target, right in zip(targets, arrived, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @contained(lambda: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages of SGLang's (`get_data_page`), a chain."""
        if self._kv is None or not isinstance(pages := self._kv.pages, CanonicalPages):
            return self._no_flat_pages()
        if values is None or len(values) != len(keys):
            return False
        names = page_keys(keys)
        return all(self._kv.save(names, lambda i, page: pages.save_flat(values[i], page), None))

    @contained(nothing)
    def clear(self) -> None:
        """Forget the pages of this namespace, and nothing else in the pool.

        SGLang's scheduler asks, and millions of pages take longer than it should stand still: the rest goes on then.
        """
        views = [stored.view for stored in (self._kv, *self._others.values()) if stored is not None]

        @contained(nothing)
        def clear() -> None:
            for view in views:
                if view is not None:
                    view.clear()

        done_apart(clear, _CLEAR_S, "sglang.clear", "clearing the pool takes longer than %g s, and goes on", logger)

    def get_stats(self) -> StorageMetrics:
        """What was moved since the last call. SGLang's scheduler asks in each of its rounds."""
        self._count_failures()
        return self.metrics.drain()

    @contained(nothing)
    def _count_failures(self) -> None:
        """Enter what this process did not get from behind the pool: `agent_lost` is the cause `lost` of an `agent`."""
        for cause, count in self._store.take_failures().items() if self._store is not None else ():
            operation, _, why = cause.partition("_")
            self.metrics.failed(operation, why, count)

    @contained(nothing)
    def close(self) -> None:
        """Let go of the store; every later call misses. May be called twice, also by SGLang's scheduler."""
        self._movers.stop()
        if self._store is not None:
            said = "closing the pool takes longer than %g s, and goes on"
            done_apart(contained(nothing)(self._store.close), _CLOSE_S, "sglang.close", said, logger)

    def _check_page_size(self, pool: HostKVCache) -> None:
        page_size = getattr(pool, "page_size", None)
        if "page_tokens" in self._given and self._config.page_tokens != page_size:
            raise ConfigError(
                f"page_tokens is {self._config.page_tokens}, but SGLang's pages have {page_size} tokens: start it with "
                f"--page-size {self._config.page_tokens}, or leave page_tokens out"
            )
        if page_size != self._config.page_tokens:
            logger.info(
                "SGLang's pages have %s tokens; vLLM shares them only with page_tokens %s (it is %d by default)",
                page_size, page_size, self._config.page_tokens,
            )  # fmt: skip

    def _stored(self, pages: HostPages, shard: Shard, other: dict[str, Any] | None = None) -> StoredPool:
        view = partial(self._view, shard, pages.unit_nbytes, other)
        return StoredPool(pages, view, self._movers, self.metrics, self._config, self._is_asked)

    def _is_asked(self) -> bool:
        return self.asked() and not self.hurried

    def _current_namespace(self) -> Namespace | None:
        """None while the model has no name yet."""
        return None if self._namespace is None else in_memory.of(self._namespace)

    def _view(self, shard: Shard, unit_nbytes: int, other: dict[str, Any] | None) -> ShardView | None:
        """The pages of the model's own pool, or of another pool of the instance; None while there is no store."""
        namespace = self._current_namespace()
        if self._store is None or namespace is None:
            return None
        return self._store.view(namespace if other is None else of_opaque_pool(namespace, other), shard, unit_nbytes)

    def _whole(self) -> ShardView | None:
        """The model's own pool as all ranks of the instance have it together, where they are on this host."""
        namespace = self._current_namespace()
        if not self._sees_all_ranks or self._kv is None or namespace is None:
            return None
        return self._view(Shard(0, namespace.num_layers, 0, namespace.num_kv_heads), self._kv.pages.unit_nbytes, None)

    def _other(self, transfer: PoolTransfer) -> StoredPool | None:
        return self._kv if transfer.name == PoolName.KV else self._others.get(transfer.name)

    def _load(self, stored: StoredPool | None, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        def load() -> list[bool] | None:
            slots = first_slots(stored, keys, indices)
            if stored is None or slots is None:
                return None
            return stored.load(
                page_keys(keys), lambda i, part, page: stored.pages.load(slots[i], part, page), self.wanted
            )

        arrived = contained(nothing)(load)() or [False] * len(keys)
        if stored is self._kv:
            self._count_loaded(arrived)
        return arrived

    def _count_loaded(self, arrived: list[bool]) -> None:
        """Pages that were found, and that SGLang asked for, are hits where they came."""
        if self._kv is None:
            return
        loaded = sum(arrived)
        self.loaded_tokens += loaded * self._kv.pages.page_slots
        if self.counts_lookups:
            self.metrics.hit(loaded * self._kv.pages.page_slots)
        if self.wanted():
            self._missed(Miss.LOAD_FAILED, len(arrived) - loaded)

    def _save(
        self,
        stored: StoredPool | None,
        keys: Sequence[str],
        indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> list[bool]:
        def save() -> list[bool] | None:
            slots = first_slots(stored, keys, indices)
            if stored is None or slots is None or not self.kept():
                return None
            parent = parent_key(extra_info)
            if stored is not self._kv and parent is not None and not stored.contains([parent])[0]:
                parent = None  # states are kept here and there: no state before is no reason to be evicted
            return stored.save(page_keys(keys), lambda i, page: stored.pages.save(slots[i], page), parent, self.kept)

        return contained(nothing)(save)() or [False] * len(keys)

    def _load_flat(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        kv = self._kv
        if kv is None or not isinstance(pages := kv.pages, CanonicalPages):
            return [self._no_flat_pages()] * len(keys)

        def load() -> list[bool]:
            return kv.load(
                page_keys(keys), lambda i, part, page: pages.load_flat(targets[i], part, page), self.wanted
            )

        arrived = contained(lambda: [False] * len(keys))(load)()
        self._count_loaded(arrived)
        return arrived

    def _no_flat_pages(self) -> bool:
        log_once(
            "sglang.flat",
            "this host pool cannot be stored through SGLang's copying interface; use --hicache-storage-backend "
            "mooncake_connector, or with `dynamic` the extra-config key interface_v1: 1",
            logger=logger,
        )
        return False
