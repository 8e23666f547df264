"""A worker's KV cache, as long as the engine lets it be touched: what both the pool and transfers know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.geometry import Shard
from transfer.device_order import Wait
from vllm_plugin.blocks import KVBlocks, probe_cpu_order, register_tensors
from vllm_plugin.device.opening import Device, locks_for, open_device
from vllm_plugin.device.page_locks import PageLocks
from vllm_plugin.device.pages import DevicePages
from vllm_plugin.geometry import Geometry, Group
from vllm_plugin.states import StateBlocks, StateGroup, state_tensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class GroupMemory:
    """The blocks of one group of layers.

    Args:
        fmt: of the pages of this rank's `shard`.
        is_writer: whether this rank stores its shard, or another one that holds the same heads.
        tensors: of its layers, in order; none before the engine has registered them.
        blocks: None before the engine has registered blocks that are understood, and while it has taken them away.
        device_pages: the same blocks, where their device moves pages by itself.
    """

    def __init__(self, group: Group, shard: Shard, page_tokens: int, *, is_writer: bool) -> None:
        self.group, self.shard, self.is_writer = group, shard, is_writer
        self.fmt = group.page_format(shard, page_tokens)
        self.tensors: list[torch.Tensor] = []
        self.blocks: KVBlocks | StateBlocks | None = None
        self.device_pages: DevicePages | None = None

    def understand(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, engine: VllmConfig
    ) -> tuple[list[torch.Tensor], KVBlocks | StateBlocks]:
        """What the engine's tensors of these layers are.

        Raises:
            Unsupported: they cannot be understood.
        """
        group = self.group
        if isinstance(group, StateGroup):
            states = state_tensors(kv_caches, group, num_blocks)
            return states, StateBlocks(states, self.shard, group.k_dim, group.block_tokens)
        tensors = register_tensors(kv_caches, group.layer_names, num_blocks, group.block_tokens)
        order = None
        if tensors[0].device.type == "cpu" and not group.is_mla:
            block_tokens, compute_dtype = int(tensors[0].shape[2]), engine.model_config.dtype
            cache_dtype = engine.cache_config.cache_dtype if group.itemsize == 1 else "auto"  # of layers left out
            order = probe_cpu_order(self.fmt, block_tokens, group.kv_dtype, compute_dtype, cache_dtype)
        return tensors, KVBlocks(tensors, self.shard, self.fmt, order)


class KVMemory:
    """See the module.

    Args:
        geometry: of the instance; `tp_rank`, `pp_rank` say which shards are this worker's.
        groups: by their positions in `geometry.groups`, those of which this worker has layers.
    """

    def __init__(self, vllm_config: VllmConfig, geometry: Geometry, config: Config, num_blocks: int) -> None:
        self._vllm_config, self._config, self._num_blocks = vllm_config, config, num_blocks
        self.geometry, self.page_tokens = geometry, int(config.page_tokens)
        pp_rank, tp_rank = divmod(vllm_config.parallel_config.rank % geometry.num_ranks, geometry.tp_size)
        self.groups = {
            position: GroupMemory(group, shard, self.page_tokens, is_writer=group.is_writer(tp_rank))
            for position, group in enumerate(geometry.groups)
            if (shard := group.shard(pp_rank, tp_rank)) is not None
        }
        self.is_first_rank = 0 in self.groups and not tp_rank and self.groups[0].shard.layer_start == 0
        """Of those that have layers of the group that stands for the model."""
        in_parts = vllm_config.parallel_config.use_ubatching
        self.layers = () if in_parts else attention_layers(geometry)
        """Layers of which each is computed when it is named. A batch in parts runs through them once for each part, and
        a layer is named when one of them is."""
        self.record: Callable[[], Wait | None] = lambda: None
        """See `recorder`."""
        self.locks: PageLocks | None = None
        """What the driver of the blocks' device has locked of the pool's memory; None where there is none."""
        self.device: torch.device | None = None
        """Of the blocks; None before they are registered."""
        self._device: Device | None = None
        self.sleeps = False
        """Whether the memory may be gone between two steps. A read of it would be the end of the process."""

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take over the engine's KV tensors, of all groups or none.

        Raises:
            Unsupported: they cannot be understood.
        """
        engine = self._vllm_config
        understood = [part.understand(kv_caches, self._num_blocks, engine) for part in self.groups.values()]
        self.device = device = understood[0][0][0].device
        self.record = recorder(device)
        self.sleeps = device.type != "cpu" and can_unmap(engine.model_config)
        for part, (tensors, blocks) in zip(self.groups.values(), understood, strict=True):
            part.tensors, part.blocks = tensors, blocks
        if self._config.prefix_reuse:
            self._open_device(device)

    def _open_device(self, device: torch.device) -> None:
        """Have the device move pages by itself, where it can."""
        self.locks = self.locks or locks_for(device)
        parts = [part for part in self.groups.values() if isinstance(part.blocks, KVBlocks)]
        if self.locks is None or not parts:
            return
        page_nbytes = max(part.fmt.nbytes for part in parts)
        whole_nbytes = max(part.group.page_format(part.group.whole, self.page_tokens).nbytes for part in parts)
        self._device = open_device(device, self.locks, self._config.device_slab, page_nbytes, whole_nbytes)
        for part in parts:
            if self._device is not None and isinstance(part.blocks, KVBlocks):
                part.device_pages = self._device.pages(part.blocks, part.shard, part.fmt)
        if self._device is not None and not any(part.device_pages for part in parts):
            self._device.close()
            self._device = None

    @property
    def registered(self) -> bool:
        """Whether the memory is there and understood."""
        return all(part.blocks is not None for part in self.groups.values())

    def release(self) -> None:
        """The engine has taken its memory away: nothing here touches it from now on."""
        for part in self.groups.values():
            part.blocks = part.device_pages = None
        device, self._device = self._device, None
        if device is not None:
            device.close()

    @property
    def storages(self) -> list[tuple[int, int]]:
        """`(address, nbytes)` of what the tensors lie in, each once."""
        storages = [tensor.untyped_storage() for part in self.groups.values() for tensor in part.tensors]
        return sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})


def attention_layers(geometry: Geometry) -> tuple[str, ...]:
    """Those of all groups that vLLM names while it computes them; it names none that keeps a state."""
    return tuple(name for group in geometry.groups if group.kind != "state" for name in group.layer_names)


def can_unmap(model: ModelConfig) -> bool:
    """Whether the KV cache is in an allocator of vLLM's that takes its memory away: in sleep mode, and on CUDA also
    without it (`release_kv_cache_memory`)."""
    return model.enable_sleep_mode or getattr(model, "enable_cumem_allocator", False)


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

        return DeviceMark(device, event)

    return record


@dataclass(frozen=True, slots=True)
class DeviceMark:
    """A place in what was queued on a device; to call it is to wait until the device has come there."""

    device: torch.device
    event: torch.Event

    def __call__(self) -> None:
        torch.accelerator.set_device_index(self.device)
        self.event.synchronize()

    def passed(self) -> bool:
        torch.accelerator.set_device_index(self.device)
        return bool(self.event.query())
