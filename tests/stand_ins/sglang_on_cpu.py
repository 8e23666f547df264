"""A plugin for SGLang that lets HiCache run on a CPU; for tests alone, and inert where there is a GPU.

The folder of this file is put on a server's PYTHONPATH; its `.dist-info` makes it a plugin. What it replaces is CUDA
itself: the copy kernels between device and host pools, page-locked memory, events, NCCL. The pools, their layouts and
the choice of a kernel stay SGLang's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["register"]


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if torch.cuda.is_available():
        return
    _forget_pinning()
    from sglang.srt.distributed.device_communicators import pynccl
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    pynccl.NCCLLibrary = _no_nccl  # else found, and asked for the GPUs of the ranks
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30  # of 10 GiB, which a small machine with two engines has not free
    common._cuda_host_register = lambda buffer, granularity=None: None
    torch.cuda.Event, torch.cuda.current_stream = _Event, lambda device=None: None  # SGLang's own Mooncake sender
    for module in (mha, mla):
        for name, kernel in KERNELS.items():
            setattr(module, name, kernel)


def _no_nccl(path: str | None = None) -> Any:
    raise RuntimeError("no GPU to speak NCCL with")


class _Event:
    """Of a stream on which everything is done at once."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def _forget_pinning() -> None:
    """Make `pin_memory=True` mean nothing: torch would look for a GPU."""
    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(factory: Any) -> Any:
    def make(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return factory(*args, **options)

    return make


# The kernels, by what they move between: lf is [layer][token], on the device and on a layer_first host; pf is
# [token][layer]; ph is [page][head][token][layer]; direct_pf is [page][layer][token]. SGLang names every argument.

Tensor = torch.Tensor
Tensors = list[Tensor]


def of_k_and_v(kernel: Callable[..., None]) -> Callable[..., None]:
    """What moves K and V, made of what moves one of them: `src_k` and `src_v` are each its `src`."""

    def move(**arguments: Any) -> None:
        for own, other in (("_k", "_v"), ("_v", "_k")):
            kernel(**{name.replace(own, "", 1): value for name, value in arguments.items() if other not in name})

    return move


def per_layer(src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, **_: Any) -> None:
    dst[dst_indices] = src[src_indices]


def per_layer_pf_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices, layer_id]


def per_layer_ph_lf(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, layer_id: int, page_size: int, **_: Any
) -> None:
    dst[dst_indices] = src[src_indices // page_size, :, src_indices % page_size, layer_id]


def per_layer_direct_pf_lf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Tensor, dst_indices: Tensor, layer_id: int, page_size: int
) -> None:
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[src_indices // page_size, layer_id, src_indices % page_size]


def direct(src_layers: Tensors, dst_layers: Tensors, src_indices: Tensor, dst_indices: Tensor, **_: Any) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def all_layer(
    src_layers: Tensor, dst_layers: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    for src, dst in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        _rows(dst, dst_indices, item_size)[dst_indices] = _rows(src, src_indices, item_size)[src_indices]


def all_layer_lf_pf(
    src_layers: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    for layer, src in enumerate(src_layers.tolist()):
        tokens = _rows(src, src_indices, item_size)[src_indices]
        dst[dst_indices, layer] = tokens.view(dst.dtype).view(-1, *dst.shape[2:])


def all_layer_lf_ph(
    src_layers: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor,
    item_size: int, page_size: int, head_num: int, **_: Any,
) -> None:  # fmt: skip
    for layer, src in enumerate(src_layers.tolist()):
        tokens = _rows(src, src_indices, item_size)[src_indices].view(dst.dtype).view(-1, head_num, dst.shape[-1])
        dst[dst_indices // page_size, :, dst_indices % page_size, layer] = tokens


def all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """`src_ptrs` are all layers of the first of `dst_ptrs`, then all layers of the second."""
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for number, src in enumerate(src_ptrs):
        part, layer = divmod(number, num_layers)
        dst_ptrs[part][dst_indices // page_size, layer, dst_indices % page_size] = src[src_indices]


def _rows(address: int, indices: Tensor, nbytes: int) -> Tensor:
    """Rows of `nbytes` each from `address` on, as far as `indices` reach: SGLang passes tables of pointers."""
    count = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (count * nbytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, nbytes)


KERNELS = {
    "transfer_kv_per_layer": of_k_and_v(per_layer),
    "transfer_kv_per_layer_mla": per_layer,
    "transfer_kv_per_layer_pf_lf": of_k_and_v(per_layer_pf_lf),
    "transfer_kv_per_layer_mla_pf_lf": per_layer_pf_lf,
    "transfer_kv_per_layer_ph_lf": of_k_and_v(per_layer_ph_lf),
    "transfer_kv_per_layer_direct_pf_lf": per_layer_direct_pf_lf,
    "transfer_kv_direct": direct,
    "transfer_kv_all_layer": of_k_and_v(all_layer),
    "transfer_kv_all_layer_mla": all_layer,
    "transfer_kv_all_layer_lf_pf": of_k_and_v(all_layer_lf_pf),
    "transfer_kv_all_layer_mla_lf_pf": all_layer_lf_pf,
    "transfer_kv_all_layer_lf_ph": of_k_and_v(all_layer_lf_ph),
    "transfer_kv_all_layer_direct_lf_pf": all_layer_direct_lf_pf,
}
