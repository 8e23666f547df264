"""SGLang's own cache controller and its threads, over host pools without a server: one rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_pool_entry
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.pool_host import HostPoolGroup
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

WAIT_S = 60.0


class Rank:
    """A controller inside `instances.server`, with the backend of the name `name` attached.

    What the radix tree does between two steps of the controller is done here: it finds room for a hit.

    Args:
        device: the device pool; SGLang asks it what kind of model this is.
        sidecars: host pools beside the KV pool.
    """

    def __init__(
        self,
        device: KVCache,
        host_pool: Any,
        pool: Path,
        *,
        name: str,
        tp_rank: int = 0,
        sidecars: dict[PoolName, Any] | None = None,
        **extra: Any,
    ) -> None:
        self.host_pool, self.page_size = host_pool, host_pool.page_size
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        entries = [
            build_pool_entry(
                name=entry,
                host_pool=each,
                device_pool=device,
                layer_mapping={layer: layer for layer in range(device.layer_num)},
                transfer_layer_id_max=device.layer_num,
                is_anchor=entry is PoolName.KV,
            )
            for entry, each in {PoolName.KV: host_pool, **(sidecars or {})}.items()
        ]
        allocator = PagedTokenToKVPoolAllocator(
            device.size, device.page_size, torch.bfloat16, "cpu", device, need_sort=False
        )
        with get_parallel().override(tp_rank=tp_rank, pp_rank=0):
            self.controller = HybridCacheController(
                allocator,
                HostPoolGroup(entries),
                self.page_size,
                torch.distributed.group.WORLD,
                threading.Event(),
                io_backend="kernel",
                storage_backend=name,
                prefetch_threshold=self.page_size,
                model_name="served",
                storage_backend_extra_config={"pool": str(pool), "capacity": "64MiB", **extra},
            )

    def save(
        self, tokens: Sequence[int], slots: torch.Tensor, sidecars: list[PoolTransfer] | None = None
    ) -> tuple[int, dict[str, int]]:
        """Store the full pages of `tokens`, which lie at `slots`; tokens that were stored, pages of each sidecar."""
        names = get_storage_hash_str(list(tokens), None, page_size=self.page_size)
        self.controller.write_storage(slots, list(tokens), names, [], sidecars)
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        return operation.completed_tokens, operation.pool_storage_result.extra_pool_hit_pages

    def load(
        self, tokens: Sequence[int], sidecars: list[PoolTransfer] | None = None
    ) -> tuple[int, torch.Tensor, dict[str, int]]:
        """Prefetch what the store has of `tokens`: how many tokens came, to which slots, pages of each sidecar."""
        self.controller.prefetch(CacheRequestHandle("request", 0), list(tokens), None, [], sidecars)
        operation = self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        if operation.storage_hit_count == 0:
            return 0, torch.zeros(0, dtype=torch.int64), {}
        operation.host_indices = self.host_pool.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        loaded, hits = 0, {}
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            loaded = loaded if ack.completed_tokens is None else ack.completed_tokens
            hits = ack.pool_hits or hits
        return loaded, operation.host_indices, hits

    def detach(self) -> None:
        self.controller.detach_storage_backend()
