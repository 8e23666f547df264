"""Groups of layers that keep a state in place of tokens: Mamba, gated delta rule (GDN), KDA and the like.

A state is what the tokens so far left: convolution and recurrent state of each layer, of one size however long the
prompt. In the pool it is one object for each group and rank, under the key of the page that ends where it was taken,
raw, so only an instance with the same split, shapes and kernels reads it. vLLM says which block holds one
(`boundary_state_offloads`), in `mamba_cache_mode` "align" alone; its default with prefix caching.

vLLM 0.32 hands over each layer as one tensor `[block, 1, 1, content]` of int8, whatever the state is made of: its parts
follow each other in a block, and blocks are padded to the size of those of full attention. A list of tensors
`[block, ...]`, one for each part, is understood as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import PageFormat
from store_client.base import Bytes
from vllm_plugin.blocks import index_of, own_stream, selected
from vllm_plugin.geometry import Group, Unsupported
from vllm_plugin.stages import Layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class StateGroup(Group):
    """Layers of which one block holds a state; `k_dim` is the bytes of one layer's on one rank.

    Args:
        described: whatever says what these bytes mean; part of the namespace.
    """

    described: dict[str, Any] = field(default_factory=dict)

    def heads(self, tp_rank: int) -> tuple[int, int]:
        """A rank's part of each layer's state, or all of it where every rank has the same."""
        head = tp_rank if self.num_kv_heads > 1 else 0
        return head, head + 1

    def page_format(self, shard: Shard, page_tokens: int) -> PageFormat:
        """Of an object in the pool: for as many layers `k_dim` bytes, which are no tokens'."""
        return PageFormat(shard.num_layers, 1, shard.num_heads, self.k_dim, 0, 1)

    def first_kept(self, num_tokens: int) -> int:
        """The last page's token: a load brings the object of that page alone."""
        return max(0, num_tokens - 1)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """As of any group. The split is part of it: a state of another number of ranks is a miss."""
        return {"kind": self.kind, "layers": list(self.layers), "ranks": self.num_kv_heads} | self.described


def read_states(vllm_config: VllmConfig, index: int, spec: MambaSpec, layers: Layers) -> StateGroup:
    """The group that `spec` describes.

    Raises:
        Unsupported: vLLM keeps no state at a boundary, or not every state is where it says.
    """
    parallel = vllm_config.parallel_config
    if spec.mamba_cache_mode != "align":
        raise Unsupported(
            f"its states are kept in mamba_cache_mode {spec.mamba_cache_mode!r}; only with prefix caching, in mode "
            "'align', does vLLM say which block holds one"
        )
    return StateGroup(
        index=index,
        spec=spec,
        kind="state",
        layers=layers.numbers,
        num_layers=layers.count,
        num_kv_heads=1 if spec.tp_replicated else parallel.tensor_parallel_size,
        k_dim=spec.state_content_size_bytes,
        v_dim=0,
        itemsize=1,
        kv_dtype="state",
        is_mla=False,
        block_tokens=spec.block_size,
        layer_names=layers.own,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        stages=layers.stages,
        described={
            "state": str(getattr(spec.mamba_type, "name", spec.mamba_type)),
            "shapes": [list(shape) for shape in spec.shapes],  # with the order of the convolution's: 54387
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in spec.dtypes],
            "device": current_platform.device_name,  # "cuda", "rocm": kernels have orders of their own
            "backend": str(vllm_config.mamba_config.backend.value),
        },
    )


class StateBlocks:
    """The blocks of a group of states; as `KVBlocks`, of which a page is one block's content.

    Args:
        parts: of its layers, in order, the tensors that hold a layer's state, each `[block, byte]`.
        shard: the layers that they are.
        layer_nbytes: of each layer.
    """

    def __init__(self, parts: Sequence[torch.Tensor], shard: Shard, layer_nbytes: int, block_tokens: int) -> None:
        self._parts, self._shard, self.block_tokens = parts, shard, block_tokens
        self._layer_nbytes = layer_nbytes
        self._stops = np.cumsum([part.shape[1] for part in parts])
        self.block_nbytes = int(self._stops[-1])

    def save_page(self, block_ids: Sequence[int], first_token: int, page: Bytes) -> None:
        """Copy the state of the block that token `first_token` lies in."""
        block_id = self.block_of(block_ids, first_token)
        self.pack([part[block_id] for part in self._parts], page)

    def copy(self, block_ids: Sequence[int]) -> StateCopies:
        """As :meth:`KVBlocks.copy`."""
        index = index_of(block_ids, self._parts[0].device)
        return StateCopies(self, block_ids, [selected(part, index) for part in self._parts])

    def load_page(self, part: Shard, block_ids: Sequence[int], first_token: int, page: Bytes, skip_tokens: int) -> None:
        """Overwrite the state of the block that holds the first token of the page that is not to be skipped.

        Layers that the page's `part` has beside this rank's are left out, and those that it lacks stay as they are.
        """
        block_id = self.block_of(block_ids, first_token + skip_tokens)
        ahead = (self._shard.layer_start - part.layer_start) * self._layer_nbytes
        with own_stream(self._parts[0].device):
            for state, stop in zip(self._parts, self._stops.tolist(), strict=True):
                start = stop - state.shape[1] + ahead
                if 0 <= start < page.nbytes:
                    state[block_id].copy_(torch.from_numpy(page[start : stop + ahead].copy()))

    def block_of(self, block_ids: Sequence[int], first_token: int) -> int:
        return block_ids[first_token // self.block_tokens]

    def pack(self, states: Sequence[torch.Tensor], page: Bytes) -> None:
        with own_stream(states[0].device):
            for state, content in zip(states, np.split(page, self._stops[:-1]), strict=True):
                content[:] = state.cpu().numpy()


class StateCopies:
    """Copies of states; as `BlockCopies`."""

    def __init__(self, blocks: StateBlocks, block_ids: Sequence[int], parts: list[torch.Tensor]) -> None:
        self._blocks, self._parts = blocks, parts
        self.nbytes = sum(part.numel() for part in parts)
        self._row = {block_id: row for row, block_id in enumerate(block_ids)}

    def save_page(self, block_ids: Sequence[int], first_token: int, page: Bytes) -> None:
        row = self._row[self._blocks.block_of(block_ids, first_token)]
        self._blocks.pack([part[row] for part in self._parts], page)


def state_tensors(
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]], group: StateGroup, num_blocks: int
) -> list[torch.Tensor]:
    """What vLLM registered of a group's layers, in their order, each tensor as `[block, byte]`.

    Raises:
        Unsupported: there is no such layer, or its state has another size than the configuration announced.
    """
    found: list[torch.Tensor] = []
    for name in group.layer_names:
        if name not in kv_caches:
            raise Unsupported(f"the engine registered no state for layer {name}")
        layer = kv_caches[name]
        parts = [layer] if isinstance(layer, torch.Tensor) else list(layer)
        shapes = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in parts)
        whole = all(part.shape[0] == num_blocks and part[0].is_contiguous() for part in parts)
        flat = [part.flatten(1).view(torch.uint8) for part in parts] if whole else []
        if sum(part.shape[1] for part in flat) != group.k_dim:
            raise Unsupported(f"states in tensors {shapes}; expected {num_blocks} blocks of {group.k_dim} bytes")
        found += flat
    return found
