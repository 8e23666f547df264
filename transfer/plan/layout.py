"""What a peer must know of one rank's memory to plan copies into it, and which bytes of it some blocks are.

A rank hands over *sections*: the KV of one group of layers, a table of aux rows, the state of some layers. Each has
memory, a block size and, for a request, a block table of its own.

Plain values that travel in messages and are checked where they are made. Does not touch the memory it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated

import numpy as np
from msgspec import Meta

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import Axis, BlockLayout, SegmentLayout
from transfer.transports.base import MAX_PIECE_NBYTES, Int64, TransferError

MAX_BLOCK_ELEMENTS = 1 << 24
"""Elements of a block, all heads, K and V: far beyond any engine's."""
MAX_SECTIONS = 64
MAX_TABLE_BLOCKS = 1 << 18
"""Blocks of a request that a message names, one section's."""
NO_BLOCK = -1
"""In a block table of the sending side: what these tokens had there is gone, as beyond a window."""
_MAX_NAME_LENGTH = 64
_MAX_AXES = 16
"""Strides that a segment's tokens or elements may be nested in: beyond what any order needs."""


class LayoutError(TransferError):
    """A layout that cannot be, or two that cannot be mapped onto each other."""


@dataclass(frozen=True, slots=True)
class Table:
    """What of a section a request wants: tokens (or rows) `[first_token, stop_token)`, and its whole block table.

    Whole units are moved (`Pairing.unit`), so the unit that `first_token` lies in is overwritten from its begin on.

    Raises:
        LayoutError: tokens that cannot be.
    """

    first_token: Annotated[int, Meta(le=1 << 40)]
    stop_token: Annotated[int, Meta(le=1 << 40)]
    block_ids: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 32)]], Meta(max_length=MAX_TABLE_BLOCKS)]

    def __post_init__(self) -> None:
        if not 0 <= self.first_token <= self.stop_token:
            raise LayoutError(f"tokens {self.first_token}..{self.stop_token - 1}")

    @property
    def tokens(self) -> range:
        return range(self.first_token, self.stop_token)


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a rank: which layers and heads it has, and where their bytes lie.

    What is not KV is described as if it were: its rows are tokens, a row has `k_dim` elements a layer and head. What
    has no layers or heads, has one.

    Args:
        name: says which section of a peer is the same.
        model_layers, model_heads: of the whole model, or of the group; MLA has one head.
        shard: the rank's; ranks may have the same heads (GQA with more ranks than heads, MLA).
        k_dim, v_dim: elements a token and head (MLA: latent and rope together, and 0).
        itemsize: bytes an element.
        blocks: an address for each of the rank's layers, and strides; head 0 is the rank's first.
        is_whole: it is sent as a whole, once, when the request has been computed: aux rows, state.
        is_windowed: only the last tokens are sent, and the source may have nothing of those before: windows, chunks.

    Raises:
        LayoutError: a count or a range that cannot be.
    """

    name: str
    model_layers: int
    model_heads: int
    shard: Shard
    k_dim: int
    v_dim: int
    itemsize: int
    blocks: BlockLayout
    is_whole: bool = False
    is_windowed: bool = False

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= _MAX_NAME_LENGTH or not self.name.isprintable():
            raise LayoutError(f"section {self.name[:_MAX_NAME_LENGTH]!r}: expected 1..{_MAX_NAME_LENGTH} characters")
        shard, blocks = self.shard, self.blocks
        if shard.layer_stop > self.model_layers or shard.num_layers != len(blocks.layer_addresses):
            have = len(blocks.layer_addresses)
            raise LayoutError(f"layers {shard.layers} of a model of {self.model_layers}, addresses of {have}")
        if shard.head_stop > self.model_heads:
            raise LayoutError(f"KV heads {shard.heads} of a model of {self.model_heads}")
        if min(self.k_dim, self.itemsize, blocks.block_tokens, blocks.num_blocks) < 1 or self.v_dim < 0:
            raise LayoutError(f"dimensions {self.k_dim} + {self.v_dim} of {self.itemsize} bytes, blocks {blocks}")
        if blocks.block_tokens * shard.num_heads * (self.k_dim + self.v_dim) > MAX_BLOCK_ELEMENTS:
            raise LayoutError(f"more than {MAX_BLOCK_ELEMENTS} elements in a block: {self.describe()}")
        if (blocks.v is None) != (self.v_dim == 0):
            raise LayoutError(f"v_dim={self.v_dim} and V segment {blocks.v}: both or neither")
        self._check_segment(blocks.k, self.k_dim)
        if blocks.v is not None:
            self._check_segment(blocks.v, self.v_dim)
        self._check_reach()

    def _check_segment(self, segment: SegmentLayout, dim: int) -> None:
        for axis, size in ((segment.token, self.blocks.block_tokens), (segment.dim, dim)):
            if len(axis) > _MAX_AXES:
                raise LayoutError(f"axis of {len(axis)} strides: at most {_MAX_AXES} are read")
            if prod(count for count, _ in axis) != size or any(count < 1 or stride < 0 for count, stride in axis):
                raise LayoutError(f"axis {axis} for {size} places")

    def _check_reach(self) -> None:
        """All addresses lie in what user memory can be, so that no sum of them overflows."""
        blocks = self.blocks
        segments = [blocks.k] if blocks.v is None else [blocks.k, blocks.v]
        numbers = [blocks.block_stride, blocks.head_stride, *(segment.offset for segment in segments)]
        if min(*numbers, *blocks.layer_addresses) < 0:
            raise LayoutError(f"negative address, stride or offset in {blocks}")
        reach = max(segment.offset + _last(segment.token) + _last(segment.dim) for segment in segments)
        reach += (self.shard.num_heads - 1) * blocks.head_stride + (blocks.num_blocks - 1) * blocks.block_stride
        if max(blocks.layer_addresses) + reach + self.itemsize > MAX_PIECE_NBYTES:
            raise LayoutError(f"memory beyond {MAX_PIECE_NBYTES:#x}: {blocks}")

    @property
    def block_tokens(self) -> int:
        return self.blocks.block_tokens

    def describe(self) -> str:
        """One line for the message of a refusal."""
        shard, whole = self.shard, ", sent whole" if self.is_whole else ""
        layers = f"layers {shard.layer_start}..{shard.layer_stop - 1} of {self.model_layers}"
        heads = f"KV heads {shard.head_start}..{shard.head_stop - 1} of {self.model_heads}"
        return (
            f"section {self.name!r}: {layers}, {heads}, {self.k_dim} + {self.v_dim} elements of {self.itemsize} bytes, "
            f"blocks of {self.block_tokens} tokens{whole}"
        )

    def check_blocks(self, block_ids: Sequence[int] | Int64) -> Int64:
        """The ids as an array. Raises LayoutError for one that the rank does not have."""
        ids = np.asarray(block_ids, dtype=np.int64)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.blocks.num_blocks):
            raise LayoutError(f"block ids {ids.min()}..{ids.max()}; there are blocks 0..{self.blocks.num_blocks - 1}")
        return ids

    def holding(self, block_ids: Sequence[int], first_token: int, stop_token: int) -> Sequence[int]:
        """Those of a request's block table that hold tokens `[first_token, stop_token)`."""
        return block_ids[first_token // self.block_tokens : -(-stop_token // self.block_tokens)]

    def ranges(self, block_ids: Sequence[int]) -> tuple[Int64, Int64]:
        """Addresses and sizes of all bytes of these blocks, ascending and merged: what a grant of them covers."""
        starts, sizes = _block_runs(self)
        base = np.sort(np.asarray(self.blocks.layer_addresses, dtype=np.int64))
        offsets = np.unique(self.check_blocks(block_ids)) * self.blocks.block_stride
        addresses = (base[:, None, None] + offsets[:, None] + starts).ravel()
        nbytes = np.broadcast_to(sizes, (len(base), len(offsets), len(sizes))).ravel()
        if (addresses[1:] < addresses[:-1]).any():  # layers lie inside blocks
            order = np.argsort(addresses, kind="stable")
            addresses, nbytes = addresses[order], nbytes[order]
        return merge(addresses, nbytes)


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank hands over. Ranks of an instance may have different sections, as pipeline stages do.

    Raises:
        LayoutError: no section, too many, or two of one name.
    """

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        names = [section.name for section in self.sections]
        if not 0 < len(names) <= MAX_SECTIONS or len(set(names)) < len(names):
            raise LayoutError(f"sections {names[: MAX_SECTIONS + 1]}: expected 1..{MAX_SECTIONS}, each name once")

    def index(self, name: str) -> int | None:
        """The number of the section of this name, if the rank has it."""
        return next((number for number, section in enumerate(self.sections) if section.name == name), None)

    def check_tables(self, tables: Sequence[Table]) -> None:
        """Raises LayoutError for another number of tables than of sections, blocks that the rank does not have, or
        tokens beyond those of a table: a plan takes memory for each."""
        if len(tables) != len(self.sections):
            raise LayoutError(f"{len(tables)} block tables for {len(self.sections)} sections")
        for section, table in zip(self.sections, tables, strict=True):
            covered = len(section.check_blocks(table.block_ids)) * section.block_tokens
            if table.tokens and table.stop_token > covered:
                raise LayoutError(f"section {section.name!r}: tokens up to {table.stop_token} in blocks of {covered}")

    def ranges(self, tables: Sequence[Table]) -> tuple[Int64, Int64]:
        """What a grant of these tables covers, one of each section: the bytes of the blocks that hold their tokens.

        Raises:
            LayoutError: another number of tables, or blocks that the rank does not have.
        """
        self.check_tables(tables)
        found = [
            section.ranges(section.holding(table.block_ids, table.first_token, table.stop_token))
            for section, table in zip(self.sections, tables, strict=True)
        ]
        return np.concatenate([starts for starts, _ in found]), np.concatenate([sizes for _, sizes in found])


def element_offsets(layout: Section) -> Int64:
    """`[token, element of K, then of V]`: bytes from the start of a block and head."""
    segments = [layout.blocks.k] if layout.blocks.v is None else [layout.blocks.k, layout.blocks.v]
    parts = [s.offset + _places(s.token)[:, None] + _places(s.dim)[None, :] for s in segments]
    return np.concatenate(parts, axis=1)


def merge(starts: Int64, sizes: Int64) -> tuple[Int64, Int64]:
    """Ascending ranges that do not overlap, with those that touch made one."""
    if len(starts) == 0:
        return starts, sizes
    first = np.concatenate(([True], starts[1:] != starts[:-1] + sizes[:-1]))
    return starts[first], np.add.reduceat(sizes, np.flatnonzero(first))


@lru_cache(maxsize=64)
def _block_runs(layout: Section) -> tuple[Int64, Int64]:
    """Offsets and sizes of the bytes of one block of one layer, all heads. Raises LayoutError where any coincide."""
    heads = np.arange(layout.shard.num_heads, dtype=np.int64) * layout.blocks.head_stride
    head = np.sort(element_offsets(layout).ravel())
    starts, sizes = merge(head, np.full(len(head), layout.itemsize, dtype=np.int64))
    starts, sizes = (heads[:, None] + starts).ravel(), np.tile(sizes, len(heads))
    order = np.argsort(starts, kind="stable")
    starts, sizes = starts[order], sizes[order]
    if (starts[1:] < starts[:-1] + sizes[:-1]).any():
        raise LayoutError(f"elements of a block share bytes: {layout.blocks}")
    return merge(starts, sizes)


def _places(axis: Axis) -> Int64:
    """Where index 0, 1, 2, ... of a nested axis lies."""
    places = np.zeros(1, dtype=np.int64)
    for size, stride in axis:
        places = (places[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return places


def _last(axis: Axis) -> int:
    return sum((size - 1) * stride for size, stride in axis)
