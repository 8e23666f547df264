"""Pages in SGLang's host memory: where a page lies in a host KV pool, and the copy between it and a stored page.

SGLang keeps its second cache level in *host pools*: tensors whose axes are ordered by `--hicache-mem-layout`. A page is
`page_size` consecutive slots. :class:`CanonicalPages` knows the pools of plain K/V and MLA caches and moves canonical
pages; `opaque_pages` moves the bytes of any other pool as they are.
"""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import BlockLayout, PageFormat, SegmentLayout, fit, pack, unpack
from store_client.base import Bytes

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

_POOL_AXES = {
    "layer_first": "lbthd",
    "page_first": "btlhd",
    "page_first_direct": "blthd",
    "page_head": "bhtld",
}
"""Order of the axes block, token, layer, head and dim of one host buffer (K or V), slowest first.

Source: `init_kv_buffer` of SGLang's MHATokenToKVPoolHost and MLATokenToKVPoolHost, where block and token are one axis
of slots in the first two.
"""


class HostPages(Protocol):
    """Pages of one host pool, each named by the index of its first slot."""

    page_slots: int
    """Slots of the pool that a page takes."""

    @property
    def unit_nbytes(self) -> int:
        """Bytes of one layer and one KV head of a page."""

    def load(self, first_slot: int, part: Shard, page: Bytes) -> None:
        """Copy what the pool needs of `page`, the stored page of `part`, to the slots from `first_slot` on."""

    def save(self, first_slot: int, page: Bytes) -> None:
        """Copy the slots from `first_slot` on into `page`, the page of this rank's shard."""


TOKEN_ROWS = "nhd"


def device_rows(pool: HostKVCache) -> str:
    """How K and V lie in a page on the device, of which the host pool has the bytes in that order.

    Whatever the host pool's layout says, one of its slots is a token only where this is `TOKEN_ROWS`: with
    SGLANG_USE_HND_KVCACHE a page has its heads first, and SGLang copies it as so many rows all the same.
    """
    infos = getattr(pool, "_buffer_infos", ())  # MHA pools alone; latents have one order
    return str(infos[0].buffers.layout.value) if infos else TOKEN_ROWS


def plain_format(pool: HostKVCache) -> PageFormat | None:
    """The page of a pool that has K beside V, or MLA vectors, and nothing else; None for every other pool."""
    kind = type(pool)
    if kind not in (MHATokenToKVPoolHost, MLATokenToKVPoolHost) or pool.layout not in _POOL_AXES:
        return None
    is_mla = kind is MLATokenToKVPoolHost
    buffer = pool.kv_buffer
    if buffer is None or not buffer.is_contiguous() or buffer.device.type != "cpu":
        return None
    if pool.layer_num != pool.target_layer_num:  # layers of a draft model are packed behind
        return None
    if device_rows(pool) != TOKEN_ROWS:
        return None
    if is_mla and getattr(pool, "dcp_size", 1) > 1:
        return None
    return PageFormat(
        num_layers=pool.layer_num,
        num_heads=1 if is_mla else pool.head_num,
        k_dim=pool.kv_cache_dim if is_mla else pool.head_dim,
        v_dim=0 if is_mla else pool.v_head_dim,
        itemsize=pool.dtype.itemsize,
        page_tokens=pool.page_size,
    )


class CanonicalPages:
    """Pages of a plain K/V or MLA pool, stored as canonical pages whatever the layout.

    Args:
        shard: the layers and heads that the pool holds, counted over the whole model.
    """

    def __init__(self, pool: HostKVCache, fmt: PageFormat, shard: Shard) -> None:
        self.page_slots = fmt.page_tokens
        self._fmt, self._shard = fmt, shard
        self._axes = _POOL_AXES[pool.layout]
        self._buffer = pool.kv_buffer  # what is addressed stays allocated
        num_blocks = pool.size // fmt.page_tokens
        v_offset = None if fmt.v_dim == 0 else self._buffer[1].data_ptr() - self._buffer[0].data_ptr()
        self._layout = _block_layout(fmt, self._axes, self._buffer.data_ptr(), num_blocks, v_offset)

    @property
    def unit_nbytes(self) -> int:
        return self._fmt.unit_nbytes

    def load(self, first_slot: int, part: Shard, page: Bytes) -> None:
        self._load(self._layout, first_slot // self.page_slots, part, page)

    def save(self, first_slot: int, page: Bytes) -> None:
        pack(self._fmt, self._layout, (first_slot // self.page_slots,), 0, page)

    def load_flat(self, target: torch.Tensor, part: Shard, page: Bytes) -> None:
        """As `load`, into a page that SGLang handed out flat (`get_dummy_flat_data_page`)."""
        self._load(self._flat_layout(target), 0, part, page)

    def save_flat(self, source: torch.Tensor, page: Bytes) -> None:
        """As `save`, from a page that SGLang flattened (`get_data_page`)."""
        pack(self._fmt, self._flat_layout(source), (0,), 0, page)

    def _load(self, layout: BlockLayout, block: int, part: Shard, page: Bytes) -> None:
        fmt, common = fit(self._fmt, self._shard, part)
        unpack(fmt, layout, (block,), 0, page, part=common)

    def _flat_layout(self, flat: torch.Tensor) -> BlockLayout:
        """A flat page has the pool's own order, K before V, without other pages in between."""
        if not flat.is_contiguous() or flat.numel() * flat.element_size() != self._fmt.nbytes:
            raise ValueError(f"a flat page of {flat.numel()} elements of {flat.dtype}, not {self._fmt.nbytes} bytes")
        v_offset = None if self._fmt.v_dim == 0 else self._fmt.k_nbytes
        return _block_layout(self._fmt, self._axes, flat.data_ptr(), 1, v_offset)


def _block_layout(fmt: PageFormat, axes: str, address: int, num_blocks: int, v_offset: int | None) -> BlockLayout:
    """The order `axes` of a contiguous buffer at `address` as a block layout; K and V are alike, `v_offset` apart."""
    sizes = {
        "b": num_blocks,
        "t": fmt.page_tokens,
        "l": fmt.num_layers,
        "h": fmt.num_heads,
        "d": fmt.k_dim,
    }
    strides = {axis: prod(sizes[inner] for inner in axes[at + 1 :]) * fmt.itemsize for at, axis in enumerate(axes)}
    token, dim = ((fmt.page_tokens, strides["t"]),), ((fmt.k_dim, strides["d"]),)
    return BlockLayout(
        layer_addresses=tuple(address + layer * strides["l"] for layer in range(fmt.num_layers)),
        num_blocks=num_blocks,
        block_tokens=fmt.page_tokens,
        block_stride=strides["b"],
        head_stride=strides["h"],
        k=SegmentLayout(0, token, dim),
        v=None if v_offset is None else SegmentLayout(v_offset, token, dim),
    )


def opaque_pages(pool: HostKVCache) -> HostPages:
    """Pages of a pool whose inside is SGLang's own affair. Raises what the pool raises if it has no pages at all."""
    try:
        return OpaquePages(pool)
    except (NotImplementedError, ValueError):  # its layout, or a part of its state, has no address
        return FlatPages(pool)


class OpaquePages:
    """Pages stored as the bytes that the pool says a page has, without a copy in between."""

    def __init__(self, pool: HostKVCache) -> None:
        self.page_slots = int(getattr(pool, "logical_page_size", pool.page_size))
        self._pool = pool
        self._nbytes = sum(len(piece) for piece in self._pieces(0))

    @property
    def unit_nbytes(self) -> int:
        return self._nbytes

    def load(self, first_slot: int, part: Shard, page: Bytes) -> None:
        at = 0
        for piece in self._pieces(first_slot):
            np.copyto(piece, page[at : at + len(piece)])
            at += len(piece)

    def save(self, first_slot: int, page: Bytes) -> None:
        np.concatenate(self._pieces(first_slot), out=page)

    def _pieces(self, first_slot: int) -> list[Bytes]:
        slots = torch.arange(first_slot, first_slot + self.page_slots, dtype=torch.int64)
        pointers, sizes = self._pool.get_page_buffer_meta(slots)
        return [_bytes_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


class FlatPages:
    """Pages stored as the flat tensors that the pool makes of them."""

    def __init__(self, pool: HostKVCache) -> None:
        self.page_slots = int(pool.page_size)
        self._pool = pool
        self._nbytes = len(_flat_bytes(pool.get_data_page(0)))

    @property
    def unit_nbytes(self) -> int:
        return self._nbytes

    def load(self, first_slot: int, part: Shard, page: Bytes) -> None:
        flat = self._pool.get_dummy_flat_data_page()
        np.copyto(_flat_bytes(flat), page)
        self._pool.set_from_flat_data_page(first_slot, flat)

    def save(self, first_slot: int, page: Bytes) -> None:
        np.copyto(page, _flat_bytes(self._pool.get_data_page(first_slot)))


def _flat_bytes(flat: torch.Tensor) -> Bytes:
    array: Bytes = flat.contiguous().view(torch.uint8).numpy()
    return array


def _bytes_at(address: int, nbytes: int) -> Bytes:
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8)
