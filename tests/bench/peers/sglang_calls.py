"""A storage backend attached to a host pool, called as SGLang's cache controller calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

_OPERATION = SimpleNamespace(request_id="bench", is_terminated=lambda: False)


class Attached:
    """One backend and one host pool; every page of the pool is in use.

    SGLang's `file` takes the controller's way of flat copies, the others here its zero-copy way.

    Args:
        name: what `--hicache-storage-backend` would be.
        config: what `--hicache-storage-backend-extra-config` would be.
        model: a backend with pages of several models tells them apart by it.
    """

    def __init__(self, name: str, config: dict[str, Any], pool: MHATokenToKVPoolHost, model: str) -> None:
        storage_config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=pool.layout == "page_first",
            model_name=model,
            extra_config=config,
        )
        self._backend = StorageBackendFactory.create_backend(name, storage_config, pool)
        self._backend.register_mem_pool_host(pool)
        self._backend.on_host_pools_registered()
        # All that these methods of the controller look at.
        self._controller = SimpleNamespace(
            storage_backend=self._backend, storage_host_pool=pool, page_size=pool.page_size
        )
        zero_copy = name != "file"
        self._page_get = HiCacheController._page_get_zero_copy if zero_copy else HiCacheController._generic_page_get
        self._page_set = HiCacheController._page_set_zero_copy if zero_copy else HiCacheController._generic_page_set
        self._slots = torch.arange(pool.size, dtype=torch.int64)
        self._page_slots = pool.page_size

    def get(self, keys: list[str]) -> int:
        """Read page i of the pool from `keys[i]`; how many pages from the first on were read."""
        done = 0
        for start in range(0, len(keys), STORAGE_BATCH_SIZE):
            done += self._page_get(self._controller, _OPERATION, *self._batch(keys, start))
        return done

    def set(self, keys: list[str]) -> bool:
        """Write page i of the pool under `keys[i]`."""
        starts = range(0, len(keys), STORAGE_BATCH_SIZE)
        return all(self._page_set(self._controller, *self._batch(keys, start)) for start in starts)

    def exists(self, keys: list[str]) -> int:
        """How many of `keys`, from the first on, are there: one call, as long as it is."""
        found: int = self._backend.batch_exists(keys, HiCacheStorageExtraInfo(prefix_keys=[]))
        return found

    def forget(self) -> None:
        """Remove all pages."""
        if isinstance(self._backend, MooncakeStore):
            self._backend.store.remove_all(True)  # its clear() leaves what was read in the last ten seconds
        else:
            self._backend.clear()

    def close(self) -> None:
        """Leave the pool; the pages stay where the backend keeps them."""
        close = getattr(self._backend, "close", None)
        if close is not None:
            close()

    def _batch(self, keys: list[str], start: int) -> tuple[list[str], torch.Tensor, HiCacheStorageExtraInfo]:
        batch = keys[start : start + STORAGE_BATCH_SIZE]
        first = start * self._page_slots
        slots = self._slots[first : first + len(batch) * self._page_slots]
        return batch, slots, HiCacheStorageExtraInfo(prefix_keys=keys[:start])
