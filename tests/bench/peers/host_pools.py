"""SGLang's own host pools, built without an engine and without a GPU."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

_DTYPE = torch.bfloat16
_DEVICE = torch.device("cpu")

_TO_CANONICAL = {
    "layer_first": ("layer page token head dim", (2, 0, 1, 3, 4, 5)),
    "page_first": ("page token layer head dim", (1, 0, 3, 2, 4, 5)),
    "page_first_direct": ("page layer token head dim", (1, 0, 2, 3, 4, 5)),
    "page_head": ("page head token layer dim", (1, 0, 4, 3, 2, 5)),
}
"""For each layout the axes of its buffer behind K/V, and their order that gives page, K/V, layer, token, head, dim."""


def make_host_pool(
    layout: str, *, num_layers: int, num_heads: int, head_dim: int, num_pages: int, page_tokens: int
) -> MHATokenToKVPoolHost:
    """A bf16 K/V host pool of `num_pages` pages, none of them in use; its device side has no tokens at all."""
    nothing = tuple(torch.empty((0, num_heads, head_dim), dtype=_DTYPE, device=_DEVICE) for _ in range(num_layers))
    pointers = torch.zeros(num_layers, dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(k=nothing, v=nothing, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD),
        page_size=page_tokens,
        head_num=num_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=_DTYPE,
        device=_DEVICE,
    )
    num_tokens = num_pages * page_tokens
    nbytes = num_tokens * num_layers * num_heads * 2 * head_dim * _DTYPE.itemsize
    with host_memory_budget_scope(nbytes):  # otherwise 10 GiB more must be free
        return MHATokenToKVPoolHost(
            info,
            host_to_device_ratio=0,
            host_size=0,
            page_size=page_tokens,
            layout=layout,
            pin_memory=False,  # nothing is copied to a device
            device_capacity_tokens=0,
            start_layer=0,
            end_layer=num_layers,
            host_token_capacity=num_tokens,
        )


def canonical_view(pool: MHATokenToKVPoolHost) -> npt.NDArray[np.uint16]:
    """The pool's own memory as `[page, K/V, layer, token, head, dim]`: canonical pages, whatever the layout."""
    axes, order = _TO_CANONICAL[pool.layout]
    sizes = {
        "page": pool.page_num,
        "layer": pool.layer_num,
        "token": pool.page_size,
        "head": pool.head_num,
        "dim": pool.head_dim,
    }
    memory = pool.kv_buffer.view(torch.uint16).numpy()
    return memory.reshape(2, *(sizes[axis] for axis in axes.split())).transpose(order)
