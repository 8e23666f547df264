"""A worker's KV cache, as long as the engine lets it be touched: what both the pool and transfers know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from mooncake_connector.config.schema import Config
from transfer.device_order import Wait
from vllm_plugin.blocks import KVBlocks, probe_cpu_order, register_tensors
from vllm_plugin.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVMemory:
    """See the module.

    Args:
        geometry: of the instance; `tp_rank`, `pp_rank` say which shard is this worker's.
    """

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry, config: Config, num_blocks: int) -> None:
        self._vllm_config, self._num_blocks = vllm_config, num_blocks
        self.geometry = geometry
        rank = vllm_config.parallel_config.rank % (geometry.tp_size * geometry.pp_size)
        pp_rank, tp_rank = divmod(rank, geometry.tp_size)
        self.shard = geometry.shard(pp_rank, tp_rank)
        self.is_writer = geometry.is_writer(tp_rank)
        self.fmt = geometry.page_format(self.shard, int(config.page_tokens))
        in_parts = vllm_config.parallel_config.use_ubatching
        self.layers = () if in_parts else geometry.layer_names
        """Layers of which each is computed when it is named. A batch in parts runs through them once for each part, and
        a layer is named when one of them is."""
        self.tensors: list[torch.Tensor] = []
        self.blocks: KVBlocks | None = None
        """None before the engine has registered blocks that are understood, and while it has taken them away."""
        self.record: Callable[[], Wait | None] = lambda: None
        """See `recorder`."""
        self.sleeps = False
        """Whether the memory may be gone between two steps. A read of it would be the end of the process."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take over the engine's KV tensors.

        Raises:
            Unsupported: they cannot be understood.
        """
        geometry, engine = self.geometry, self._vllm_config
        tensors = register_tensors(kv_caches, geometry.layer_names, self._num_blocks, geometry.block_tokens)
        device, order = tensors[0].device, None
        if device.type == "cpu" and not geometry.is_mla:
            block_tokens, cache_dtype = int(tensors[0].shape[2]), engine.cache_config.cache_dtype
            compute_dtype = engine.model_config.dtype
            order = probe_cpu_order(self.fmt, block_tokens, geometry.kv_dtype, compute_dtype, cache_dtype)
        blocks = KVBlocks(tensors, self.shard, self.fmt, order)
        self.record = recorder(device)
        self.sleeps = device.type != "cpu" and engine.model_config.enable_sleep_mode
        self.tensors, self.blocks = tensors, blocks

    @property
    def storages(self) -> list[tuple[int, int]]:
        """`(address, nbytes)` of what the tensors lie in, each once."""
        storages = [tensor.untyped_storage() for tensor in self.tensors]
        return sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})


def recorder(device: torch.device) -> Callable[[], Wait | None]:
    """Gives what waits until the work queued on the device so far is done; None where that is the processor.

    Whoever waits has the device as its thread's current one from then on. A new thread has the first device, and would
    take memory there with its first call.
    """

    def record() -> Wait | None:
        if device.type == "cpu":
            return None
        event = torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device)
        event.record()

        def wait() -> None:
            torch.accelerator.set_device_index(device)
            event.synchronize()

        return wait

    return record
