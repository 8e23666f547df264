"""The canonical page, and the permutation between it and an engine's KV blocks.

A canonical page holds `page_tokens` consecutive tokens of all layers and KV heads of one shard: the K segment
`[layer][token][head][dim]`, then the V segment of the same form, in the engine's dtype, little endian, no header.
MLA has one segment, `[layer][token][latent | rope]`. An engine keeps the same elements in *blocks*, in an order of
its own; a :class:`BlockLayout` describes that order and :func:`pack` / :func:`unpack` permute, without arithmetic.

Elements are moved as opaque bytes (bf16, fp16, fp32 and fp8 alike), so nothing here knows what a number means.
This module does not know where layouts come from (the adapters describe them) nor where pages are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from mooncake_connector.errors import PageError
from mooncake_connector.kv.geometry import Shard

Axis = tuple[tuple[int, int], ...]
"""One logical axis as nested strides: `((size, stride), ...)`, slowest first; index i is read in mixed radix."""

_WIDEST_ITEM = 4096
"""Bytes moved as one numpy item at most: longer runs gain nothing and cost numpy a larger item size."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Geometry of one canonical page of one shard.

    Args:
        num_layers: layers of the shard.
        page_tokens: tokens in a page.
        num_heads: KV heads of the shard; 1 for MLA.
        k_dim: elements of K a token and head (MLA: latent and rope together).
        v_dim: elements of V a token and head; 0 for MLA.
        itemsize: bytes an element.
    """

    num_layers: int
    page_tokens: int
    num_heads: int
    k_dim: int
    v_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "page_tokens", "num_heads", "k_dim", "itemsize"):
            if getattr(self, name) < 1:
                raise PageError(f"page format: {name}={getattr(self, name)}; it must be at least 1")
        if self.v_dim < 0:
            raise PageError(f"page format: v_dim={self.v_dim}; it must be 0 (MLA) or more")

    @property
    def k_nbytes(self) -> int:
        return self.num_layers * self.page_tokens * self.num_heads * self.k_dim * self.itemsize

    @property
    def unit_nbytes(self) -> int:
        """Bytes of one layer and one KV head, K and V."""
        return self.page_tokens * (self.k_dim + self.v_dim) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole page, K and V."""
        return self.num_layers * self.num_heads * self.unit_nbytes

    @property
    def whole(self) -> Shard:
        """All layers and heads, as the page counts them."""
        return Shard(0, self.num_layers, 0, self.num_heads)


@dataclass(frozen=True, slots=True)
class Part:
    """The layers and heads that a page and an engine's blocks have in common, as each of the two counts them."""

    page: Shard
    blocks: Shard


@lru_cache(maxsize=256)
def fit(fmt: PageFormat, shard: Shard, stored: Shard) -> tuple[PageFormat, Part]:
    """How pages of the shard `stored` fit the blocks of a rank that holds `shard` and whose own pages have `fmt`.

    Returns:
        The format of those pages, and what of them goes where.

    Raises:
        PageError: the two shards have nothing in common.
    """
    common = stored.common(shard)
    if common is None:
        raise PageError(f"{stored} and {shard} have nothing in common")
    theirs = replace(fmt, num_layers=stored.num_layers, num_heads=stored.num_heads)
    return theirs, Part(common.seen_from(stored), common.seen_from(shard))


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where K (or V) of one head lies inside a block.

    Args:
        offset: bytes from the start of the head to element (token 0, dim 0).
        token: axis of the tokens of a block, strides in bytes.
        dim: axis of the elements of a token, strides in bytes.
    """

    offset: int
    token: Axis
    dim: Axis


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where an engine keeps its KV blocks in this process's memory.

    Args:
        layer_addresses: address of block 0, head 0 of each layer, in canonical layer order.
        num_blocks: blocks a layer has; a block id outside is refused.
        block_tokens: tokens a block.
        block_stride: bytes from a block to the next.
        head_stride: bytes from a head to the next inside a block.
        k, v: the segments; `v` is None for MLA.
    """

    layer_addresses: tuple[int, ...]
    num_blocks: int
    block_tokens: int
    block_stride: int
    head_stride: int
    k: SegmentLayout
    v: SegmentLayout | None


def pack(
    fmt: PageFormat,
    layout: BlockLayout,
    block_ids: Sequence[int],
    first_token: int,
    page: npt.NDArray[np.uint8],
) -> None:
    """Copy tokens `[first_token, first_token + page_tokens)` of a request from its blocks into a canonical page.

    Args:
        fmt: of the page; the layout has as many layers and heads.
        block_ids: the request's block table; entry i holds tokens `[i * block_tokens, (i + 1) * block_tokens)`.
        page: contiguous, writable, `fmt.nbytes` bytes.

    Raises:
        PageError: the page has another size, or the block table does not cover the tokens.
    """
    _move(fmt, layout, block_ids, first_token, 0, page, None, into_blocks=False)


def unpack(
    fmt: PageFormat,
    layout: BlockLayout,
    block_ids: Sequence[int],
    first_token: int,
    page: npt.NDArray[np.uint8],
    skip_tokens: int = 0,
    part: Part | None = None,
) -> None:
    """Copy a canonical page into a request's blocks; the inverse of :func:`pack`.

    Args:
        skip_tokens: leave the first tokens of the page out: their blocks belong to others (a local prefix-cache hit).
        part: what of the page to read, and where that is in the blocks (:func:`fit`); all of both by default.

    Raises:
        PageError: as for :func:`pack`, or the part leaves the page or the blocks.
    """
    _move(fmt, layout, block_ids, first_token, skip_tokens, page, part, into_blocks=True)


def fitting(fmt: PageFormat, layout: BlockLayout, part: Part | None) -> Part:
    """What moves between pages and blocks: `part`, or where it is None all of both. Raises PageError."""
    num_layers = len(layout.layer_addresses)
    if part is None:
        if num_layers != fmt.num_layers:
            raise PageError(f"layout has {num_layers} layers, the page {fmt.num_layers}")
        return Part(fmt.whole, fmt.whole)
    if not fmt.whole.covers(part.page) or part.blocks.layer_stop > num_layers:
        raise PageError(f"{part}: the page has {fmt.whole}, the blocks {num_layers} layers")
    return part


def _move(
    fmt: PageFormat,
    layout: BlockLayout,
    block_ids: Sequence[int],
    first_token: int,
    skip_tokens: int,
    page: npt.NDArray[np.uint8],
    part: Part | None,
    *,
    into_blocks: bool,
) -> None:
    if page.nbytes != fmt.nbytes or not page.flags.c_contiguous:
        raise PageError(f"page buffer of {page.nbytes} bytes, expected {fmt.nbytes} contiguous ones")
    part = fitting(fmt, layout, part)
    pages = page.ctypes.data
    for segment, dim, base in ((layout.k, fmt.k_dim, pages), (layout.v, fmt.v_dim, pages + fmt.k_nbytes)):
        if segment is None:
            continue
        for token, count, block, offset in _runs(fmt, layout, block_ids, first_token, skip_tokens):
            for start, within, axis in _slice_axis(segment.token, offset, offset + count):
                position = token + start - offset
                engine = block * layout.block_stride + segment.offset + within
                _copy_run(fmt, part, layout, segment, dim, axis, base, position, engine, into_blocks)


def _runs(
    fmt: PageFormat, layout: BlockLayout, block_ids: Sequence[int], first_token: int, skip_tokens: int
) -> Iterator[tuple[int, int, int, int]]:
    """The page's tokens split at block borders: (token in the page, count, block id, token in the block)."""
    token = skip_tokens
    while token < fmt.page_tokens:
        index, offset = divmod(first_token + token, layout.block_tokens)
        count = min(layout.block_tokens - offset, fmt.page_tokens - token)
        if index >= len(block_ids):
            raise PageError(
                f"block table of {len(block_ids)} blocks of {layout.block_tokens} tokens does not cover tokens "
                f"{first_token}..{first_token + fmt.page_tokens - 1}"
            )
        block = int(block_ids[index])
        if not 0 <= block < layout.num_blocks:
            raise PageError(f"block id {block}; the engine has blocks 0..{layout.num_blocks - 1}")
        yield token, count, block, offset
        token += count


def _copy_run(
    fmt: PageFormat,
    part: Part,
    layout: BlockLayout,
    segment: SegmentLayout,
    dim: int,
    token_axis: Axis,
    page_base: int,
    position: int,
    engine_offset: int,
    into_blocks: bool,
) -> None:
    """Copy one run of tokens of one block, all layers and heads, with one strided numpy copy a layer group."""
    row = fmt.num_heads * dim * fmt.itemsize
    tokens = _match_radix(token_axis, row)
    dims = _match_radix(segment.dim, fmt.itemsize)
    item = fmt.itemsize
    if segment.dim[-1][1] == item and (run := segment.dim[-1][0] * item) <= _WIDEST_ITEM:  # contiguous: wider items
        item, dims, dim_axis = run, dims[:-1], segment.dim[:-1]
    else:
        dim_axis = segment.dim
    num_heads = part.page.num_heads
    heads = (num_heads, dim * fmt.itemsize)
    layer_nbytes = fmt.page_tokens * row
    first = page_base + part.page.layer_start * layer_nbytes + position * row
    first += part.page.head_start * dim * fmt.itemsize
    engine_offset += part.blocks.head_start * layout.head_stride
    addresses = layout.layer_addresses[part.blocks.layer_start : part.blocks.layer_stop]
    for index, count, stride in _layer_groups(addresses):
        canonical = _view(first + index * layer_nbytes, ((count, layer_nbytes), *tokens, heads, *dims), item)
        blocks = _view(
            addresses[index] + engine_offset,
            ((count, stride), *token_axis, (num_heads, layout.head_stride), *dim_axis),
            item,
        )
        if into_blocks:
            np.copyto(blocks, canonical)
        else:
            np.copyto(canonical, blocks)


def _match_radix(axis: Axis, stride: int) -> Axis:
    """The canonical (plain, contiguous) axis of the same sizes: innermost stride `stride`."""
    matched: list[tuple[int, int]] = []
    for size, _ in reversed(axis):
        matched.append((size, stride))
        stride *= size
    return tuple(reversed(matched))


def _slice_axis(axis: Axis, start: int, stop: int) -> list[tuple[int, int, Axis]]:
    """Index range `[start, stop)` of a nested axis as runs: (first index, byte offset, axis of the run)."""
    if start >= stop:
        return []
    stride = axis[0][1]
    rest = axis[1:]
    if not rest:
        return [(start, start * stride, ((stop - start, stride),))]
    inner = prod(n for n, _ in rest)
    runs: list[tuple[int, int, Axis]] = []
    while start < stop:
        major, within = divmod(start, inner)
        whole = (stop - start) // inner
        if within == 0 and whole:
            runs.append((start, major * stride, ((whole, stride), *rest)))
            start += whole * inner
            continue
        part = min(stop - start, inner - within)
        for first, offset, piece in _slice_axis(rest, within, within + part):
            runs.append((major * inner + first, major * stride + offset, piece))
        start += part
    return runs


@lru_cache(maxsize=64)
def _layer_groups(addresses: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Layers at equal distances, copied in one go: (first layer, count, stride)."""
    groups: list[tuple[int, int, int]] = []
    index = 0
    while index < len(addresses):
        count = 1
        stride = addresses[index + 1] - addresses[index] if index + 1 < len(addresses) else 0
        while index + count < len(addresses) and addresses[index + count] - addresses[index + count - 1] == stride:
            count += 1
        groups.append((index, count, stride))
        index += count
    return tuple(groups)


class _Memory:
    """A numpy view of raw memory; the caller guarantees that it stays mapped during the copy."""

    def __init__(self, address: int, dims: Axis, itemsize: int) -> None:
        kept = [(size, stride) for size, stride in dims if size != 1] or [(1, itemsize)]
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "typestr": _typestr(itemsize),
            "shape": tuple(size for size, _ in kept),
            "strides": tuple(stride for _, stride in kept),
        }


def _typestr(itemsize: int) -> str:
    return {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8"}.get(itemsize, f"|V{itemsize}")


def _view(address: int, dims: Axis, itemsize: int) -> npt.NDArray[np.void]:
    return np.asarray(_Memory(address, dims, itemsize))


def factor_axis(positions: npt.NDArray[np.int64]) -> Axis | None:
    """The nested axis that visits `positions` (starting at 0), or None where there is no such axis.

    Args:
        positions: where index 0, 1, 2, ... lies, in any unit; the strides returned have that unit.
    """
    length = len(positions)
    if length == 0 or positions[0] != 0:
        return None
    if length == 1:
        return ((1, 0),)
    stride = int(positions[1])
    run = 1
    while run < length and positions[run] == run * stride:
        run += 1
    while length % run:
        run -= 1
    inner = np.arange(run, dtype=np.int64) * stride
    if not np.array_equal(positions.reshape(-1, run), positions[::run, None] + inner):
        return None
    if run == length:
        return ((run, stride),)
    outer = factor_axis(positions[::run]) if run > 1 else None
    return None if outer is None else (*outer, (run, stride))


def factor_block(positions: npt.NDArray[np.int64]) -> tuple[int, Axis, Axis] | None:
    """Token and dim axes of a measured element order inside a block.

    Args:
        positions: `[token, dim]`, where each element was found.

    Returns:
        (position of element [0, 0], token axis, dim axis), or None where the order is not separable that way.
    """
    first = int(positions[0, 0])
    tokens = positions[:, 0] - first
    dims = positions[0, :] - first
    if not np.array_equal(positions, first + tokens[:, None] + dims[None, :]):
        return None
    token_axis, dim_axis = factor_axis(tokens), factor_axis(dims)
    if token_axis is None or dim_axis is None:
        return None
    return first, token_axis, dim_axis
