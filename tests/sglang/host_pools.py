"""SGLang's own host pools over its own device pools, made without a server and without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache, host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost, get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")

LAYERS, HEADS, DIM = 4, 4, 8
LATENT, ROPE = 16, 4
PAGE_TOKENS = 16
PAGES = 12

Axes = npt.NDArray[np.uint16]
"""Elements as `[page, K/V, layer, token, head, dim]`, in 16 bits each."""


def budget() -> Any:
    """SGLang wants 10 GiB free beside a host pool; not for these, or for the benchmark's of 1 GiB."""
    return host_memory_budget_scope(2 << 30)


def common(layout: str, layers: tuple[int, int], page_tokens: int, pages: int) -> dict[str, Any]:
    """What every host pool is made with."""
    return {
        "host_to_device_ratio": 0,
        "host_size": 0,
        "page_size": page_tokens,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": 0,
        "start_layer": layers[0],
        "end_layer": layers[1],
        "host_token_capacity": pages * page_tokens,
    }


def mha(
    layout: str,
    *,
    layers: tuple[int, int] = (0, LAYERS),
    heads: int = HEADS,
    dim: int = DIM,
    v_dim: int | None = None,
    page_tokens: int = PAGE_TOKENS,
    pages: int = PAGES,  # at least as many as layers: SGLang's constructor wants it so for page_head
    dtype: torch.dtype = torch.bfloat16,
) -> MHATokenToKVPoolHost:
    """The K/V host pool of a rank with layers `layers` and `heads` KV heads."""
    start, stop = layers
    shape = (page_tokens, page_tokens, dtype, heads, dim, stop - start)
    device = MHATokenToKVPool(*shape, "cpu", False, v_dim, start_layer=start, end_layer=stop)
    info = device.get_device_pool_infos()[0].buffer_info
    with budget():
        return get_mha_host_pool_cls(info)(info, **common(layout, layers, page_tokens, pages))


def mla(
    layout: str,
    *,
    layers: tuple[int, int] = (0, LAYERS),
    latent: int = LATENT,
    rope: int = ROPE,
    page_tokens: int = PAGE_TOKENS,
    pages: int = PAGES,
    **options: Any,
) -> MLATokenToKVPoolHost:
    """The host pool of a rank of an MLA model with layers `layers`."""
    start, stop = layers
    shape = (page_tokens, page_tokens, torch.bfloat16, latent, rope, stop - start)
    device = MLATokenToKVPool(*shape, "cpu", False, start_layer=start, end_layer=stop)
    info = device.get_device_pool_infos()[0].buffer_info
    options |= common(layout, layers, page_tokens, pages) | {"target_layer_num": stop - start}
    with budget():
        return MLATokenToKVPoolHost(info, **options)


def mamba(
    layers: int = 3,
    slots: int = 8,
    temporal: tuple[int, ...] = (2, 5),
    extra: bool = False,
    dtype: torch.dtype = torch.float32,
) -> MambaPoolHost:
    """States of `layers` Mamba layers, two convolutions beside each temporal state.

    Args:
        extra: further state of a slot, without a layer axis.
        dtype: of the temporal states (`--mamba-ssm-dtype`).
    """
    info = MambaStateBufferInfo(
        extra_checkpoint_buffers=(torch.zeros((slots, 7), dtype=torch.int64),) if extra else (),
        temporal=torch.zeros((layers, slots, *temporal), dtype=dtype),
        conv=tuple(torch.zeros((layers, slots, width, 3), dtype=torch.bfloat16) for width in (4, 2)),
    )
    with budget():
        return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout="page_first")


def axes(pool: HostKVCache) -> Axes:
    """The memory of an MHA or MLA pool by its axes: what is written to the result is written to the pool.

    Source: the dims in `init_kv_buffer` of SGLang's pools.
    """
    is_mla = isinstance(pool, MLATokenToKVPoolHost)
    sizes = {
        "page": pool.page_num,
        "layer": pool.layer_num,
        "token": pool.page_size,
        "head": 1 if is_mla else pool.head_num,
        "dim": pool.kv_cache_dim if is_mla else pool.head_dim,
        "kv": 1 if is_mla else 2,
    }
    order = {
        "layer_first": "kv layer page token head dim",
        "page_first": "kv page token layer head dim",
        "page_first_direct": "kv page layer token head dim",
        "page_head": "kv page head token layer dim",
    }[pool.layout].split()
    memory = pool.kv_buffer.view(torch.uint16).numpy().reshape([sizes[axis] for axis in order])
    wanted = ("page", "kv", "layer", "token", "head", "dim")
    return memory.transpose([order.index(axis) for axis in wanted])


def model(seed: int, *, pages: int = PAGES, latent: bool = False) -> Axes:
    """Elements of all layers and heads of a model: every instance holds some of them."""
    heads, dim, kv = (1, LATENT + ROPE, 1) if latent else (HEADS, DIM, 2)
    shape = (pages, kv, LAYERS, PAGE_TOKENS, heads, dim)
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, dtype=np.uint16)


def slots(pages: list[int], page_slots: int = PAGE_TOKENS) -> torch.Tensor:
    """Host indices of whole pages, as SGLang passes them."""
    return torch.cat([torch.arange(page * page_slots, (page + 1) * page_slots) for page in pages])


def bytes_of(pool: HostKVCache, page: int) -> bytes:
    """A page of any pool, flat, as SGLang itself would hand it to a storage backend."""
    flat: torch.Tensor = pool.get_data_page(page * pool.page_size)
    return flat.contiguous().view(torch.uint8).numpy().tobytes()


def fill_with(pool: HostKVCache, page: int, seed: int) -> bytes:
    """Put random content into a page of any pool through SGLang's own setter; its bytes."""
    flat = pool.get_dummy_flat_data_page()
    content = np.random.default_rng(seed).integers(0, 256, flat.numel() * flat.element_size(), dtype=np.uint8)
    pool.set_from_flat_data_page(page * pool.page_size, torch.from_numpy(content).view(flat.dtype))
    return bytes_of(pool, page)


def indexer(anchor: MLATokenToKVPoolHost) -> DSAIndexerPoolHost:
    """The index keys of a DSA model beside the pages of `anchor`; inside `instances.server`, since it asks for DCP."""
    p = anchor.page_size
    device = DSATokenToKVPool(p, p, LATENT, torch.bfloat16, ROPE, LAYERS, "cpu", 128, False, LATENT + ROPE)
    with budget():
        return DSAIndexerPoolHost(decl=make_dsa_indexer_pool_decl(device), anchor_host=anchor, pin_memory=False)
