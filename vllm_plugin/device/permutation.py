"""What moves where between canonical pages and KV blocks, as numbers that a kernel on a device is made from.

Here are no pointers to follow and nothing is copied: `kernel` does that, on a device or in Triton's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_connector.errors import PageError
from mooncake_connector.kv.page import Axis, BlockLayout, PageFormat, Part, SegmentLayout, fitting
from vllm_plugin.unsupported import Unsupported

Int64 = npt.NDArray[np.int64]

MAX_WIDTH = 16
"""Bytes that one thread moves at once at most."""


@dataclass(frozen=True, slots=True)
class Segment:
    """K or V of the layers and heads that move. All in bytes; token and head strides of one token or head are 0.

    Args:
        nbytes: of one token and head, contiguous on both sides.
        page_offset: from the start of a page to the first byte that moves of its token 0.
        page_layer, page_token, page_head: strides in a page.
        block_offset: from the start of a block of a layer to the first byte that moves of its token 0.
        block_token: stride in a block.
    """

    nbytes: int
    page_offset: int
    page_layer: int
    page_token: int
    page_head: int
    block_offset: int
    block_token: int


@dataclass(frozen=True, slots=True)
class Permutation:
    """Where bytes of pages of one form lie in the blocks of one engine.

    Args:
        width: bytes of the widest word, of 16, 8, 4, 2 and 1, that divides every address, stride and size of both
            sides; pages begin at multiples of `MAX_WIDTH`.
        num_heads: KV heads that move.
        layer_addresses: block 0, head 0 of each layer that moves.
        block_stride, head_stride: in a layer's memory, in bytes.
        segments: K and V; of MLA one.
    """

    width: int
    num_heads: int
    layer_addresses: tuple[int, ...]
    block_stride: int
    head_stride: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, fmt: PageFormat, layout: BlockLayout, part: Part | None = None) -> Permutation:
        """The permutation of pages of `fmt`.

        Args:
            part: what of a page moves, and where that is in the blocks (`page.fit`); all of both by default.

        Raises:
            PageError: the page and the blocks do not fit, as for `page.unpack`.
            Unsupported: tokens of a block are not equally spaced, or a token's elements not side by side.
        """
        part = fitting(fmt, layout, part)
        one_head = part.page.num_heads == 1
        segments = [_segment(fmt, layout, part, layout.k, fmt.k_dim, 0)]
        if layout.v is not None:
            segments.append(_segment(fmt, layout, part, layout.v, fmt.v_dim, fmt.k_nbytes))
        addresses = layout.layer_addresses[part.blocks.layer_start : part.blocks.layer_stop]
        head_stride = 0 if one_head else layout.head_stride
        numbers = [MAX_WIDTH, *addresses, layout.block_stride, head_stride]
        for one in segments:
            numbers += [one.nbytes, one.page_offset, one.page_layer, one.page_token, one.page_head]
            numbers += [one.block_offset, one.block_token]
        width = int(np.bitwise_or.reduce(np.array(numbers, dtype=np.int64)))
        return cls(
            width=width & -width,
            num_heads=part.page.num_heads,
            layer_addresses=addresses,
            block_stride=layout.block_stride,
            head_stride=head_stride,
            segments=tuple(segments),
        )

    @property
    def num_layers(self) -> int:
        """Layers that move."""
        return len(self.layer_addresses)


def _segment(fmt: PageFormat, layout: BlockLayout, part: Part, where: SegmentLayout, dim: int, base: int) -> Segment:
    elements = _plain(where.dim, "elements of a token")
    if dim > 1 and elements != fmt.itemsize:
        raise Unsupported(f"elements of a token are {elements} bytes apart in a block, not {fmt.itemsize}")
    nbytes = dim * fmt.itemsize
    token = fmt.num_heads * nbytes
    layer = fmt.page_tokens * token
    return Segment(
        nbytes=nbytes,
        page_offset=base + part.page.layer_start * layer + part.page.head_start * nbytes,
        page_layer=layer if part.page.num_layers > 1 else 0,
        page_token=token,
        page_head=nbytes if part.page.num_heads > 1 else 0,
        block_offset=part.blocks.head_start * layout.head_stride + where.offset,
        block_token=_plain(where.token, "tokens of a block"),
    )


def _plain(axis: Axis, what: str) -> int:
    """The one stride of an axis; 0 where it has one index.

    Raises Unsupported.
    """
    stride, reach = 0, 0
    for size, step in reversed(axis):
        if size == 1:
            continue
        if reach and step != reach:
            raise Unsupported(f"{what} are not equally spaced: {axis}")
        stride = stride or step
        reach = size * step
    return stride


class Runs(NamedTuple):
    """The tokens of one page as runs within one block each.

    Args:
        places: int64 [5, n], as `columns` has them but for addresses and blocks; shared by many pages.
        blocks: ids, n of them.
    """

    places: Int64
    blocks: Sequence[int]


def runs(fmt: PageFormat, layout: BlockLayout, block_ids: Sequence[int], first_token: int, skip_tokens: int) -> Runs:
    """Those of a page without its first `skip_tokens`.

    Args:
        block_ids: the request's block table; entry i holds tokens `[i * block_tokens, (i + 1) * block_tokens)`.
        first_token: of the page, in the request.

    Raises:
        PageError: the block table does not cover the tokens, or names a block that the engine does not have.
    """
    first, stop = first_token + skip_tokens, first_token + fmt.page_tokens
    if first >= stop:
        return _NONE
    size = layout.block_tokens
    begin, end = first // size, -(-stop // size)
    blocks = block_ids[begin:end]
    if len(blocks) and not 0 <= min(blocks) <= max(blocks) < layout.num_blocks:
        unknown = next(block for block in blocks if not 0 <= block < layout.num_blocks)
        raise PageError(f"block id {unknown}; the engine has blocks 0..{layout.num_blocks - 1}")
    if len(blocks) < end - begin:
        raise PageError(
            f"block table of {len(block_ids)} blocks of {size} tokens does not cover tokens {first_token}..{stop - 1}"
        )
    return Runs(_places(first % size, stop - first, size, skip_tokens), blocks)


_NONE = Runs(np.empty((5, 0), dtype=np.int64), ())


def columns(pages: Sequence[Runs], addresses: Sequence[int]) -> Int64:
    """The runs of a batch of pages, one behind the other.

    Args:
        addresses: where each page lies, multiples of `MAX_WIDTH`.

    Returns:
        int64 [5, n], C-contiguous: page address, first token in the page, tokens, block id, first token in the block.
    """
    table: Int64 = np.concatenate([one.places for one in pages], axis=1)
    table[0] = np.repeat(np.array(addresses, dtype=np.int64), [len(one.blocks) for one in pages])
    table[3] = [block for one in pages for block in one.blocks]
    return table


@functools.lru_cache(maxsize=256)
def _places(first: int, num_tokens: int, size: int, skip_tokens: int) -> Int64:
    """`Runs.places` of so many tokens, the first of which is number `first` of its block."""
    borders = np.arange(0, first + num_tokens + size, size, dtype=np.int64)
    borders = np.unique(borders.clip(first, first + num_tokens))
    places = np.zeros((5, len(borders) - 1), dtype=np.int64)
    places[1] = borders[:-1] - first + skip_tokens
    places[2], places[4] = np.diff(borders), borders[:-1] % size
    return places
