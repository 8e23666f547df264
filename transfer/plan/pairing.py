"""From two layouts to lists of copies: who sends what to whom, and which bytes go where. Pure; nothing is moved here.

`routes` divides the memory of all destination ranks among the source ranks, section by section. A `Pairing` of one
section of two ranks then turns a part of a transfer (layers, tokens, block tables) into pieces, as arrays that a
transport takes. Tokens are counted in *units*: as many as the blocks of both sides can be cut into. A unit is moved as
a whole, also where a request fills it in part only: its bytes belong to the request on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import TypeAlias

import numpy as np

from mooncake_connector.kv.geometry import Shard
from transfer.plan.layout import NO_BLOCK, LayoutError, RankLayout, Section, element_offsets
from transfer.transports.base import Int64

_MIN_RUN_NBYTES = 64
"""Pieces may be as small as one vector of K or V. Smaller ones, down to single elements, are bearable from here on."""
_MAX_PHASES = 1024
_MAX_ELEMENTS = 1 << 20
"""Elements of a head that are looked at, and runs of all heads that are kept: what a peer may make this side work."""


@dataclass(frozen=True, slots=True)
class Route:
    """What source rank number `source` sends to destination rank number `destination`.

    `parts` has what of each section of the destination, in their order, if anything. A route without any part still
    says who tells a source without work that it is done.
    """

    source: int
    destination: int
    parts: tuple[Shard | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies of `nbytes[i]` bytes from address `source[i]` to address `destination[i]` of the other process."""

    source: Int64
    destination: Int64
    nbytes: Int64


@dataclass(frozen=True, slots=True, eq=False)
class PageRuns:
    """Where the bytes of some pages lie on one side, in the order in which both sides take their checksums.

    Page number i is runs `[bounds[i], bounds[i + 1])`.
    """

    addresses: Int64
    nbytes: Int64
    bounds: Int64


def routes(sources: Sequence[RankLayout], destinations: Sequence[RankLayout]) -> list[Route]:
    """Divide all layers and heads of every destination rank's sections among the source ranks, each exactly once.

    Two ranks have one route at most, and each source has one at least.

    Where several sources have the same (GQA with more ranks than heads, MLA, aux rows), destinations that need the same
    take turns. Both sides compute the same routes from the same layouts.

    Raises:
        LayoutError: the sides differ in their sections or in what cannot be mapped, or no source has some layer and
            head.
    """
    if not sources or not destinations:
        raise LayoutError(f"{len(sources)} source and {len(destinations)} destination ranks: expected one at least")
    _check_same_sections(sources, destinations)
    having = _by_name(sources)
    found: dict[tuple[int, int], list[Shard | None]] = {}
    turns: Counter[tuple[str, Shard]] = Counter()
    for number, wanted in enumerate(destinations):
        for at, section in enumerate(wanted.sections):
            turn = turns[section.name, section.shard]
            turns[section.name, section.shard] += 1
            for source, part in _parts(having[section.name], section, turn):
                parts = found.setdefault((source, number), [None] * len(wanted.sections))
                if parts[at] is not None:
                    every = "; ".join(other.describe() for _, other in having[section.name])
                    raise LayoutError(f"source ranks overlap in part: {every}")
                parts[at] = part
    busy = {source for source, _ in found}
    for source in sorted(set(range(len(sources))) - busy):
        destination = source % len(destinations)
        found[source, destination] = [None] * len(destinations[destination].sections)
    return [Route(*pair, tuple(parts)) for pair, parts in found.items()]


def _by_name(ranks: Sequence[RankLayout]) -> dict[str, list[tuple[int, Section]]]:
    """Which ranks have each section, by their numbers."""
    found: dict[str, list[tuple[int, Section]]] = {}
    for number, rank in enumerate(ranks):
        for section in rank.sections:
            found.setdefault(section.name, []).append((number, section))
    return found


def _check_same_sections(sources: Sequence[RankLayout], destinations: Sequence[RankLayout]) -> None:
    """Raises LayoutError where a side lacks a section, or has one of another shape; with both sides' values."""
    here, there = _by_name(sources), _by_name(destinations)
    if here.keys() != there.keys():
        listed = ["; ".join(found[0][1].describe() for found in side.values()) for side in (here, there)]
        missing = ", ".join(sorted(here.keys() ^ there.keys()))
        raise LayoutError(f"only one side has section {missing}. Source: {listed[0]}. Destination: {listed[1]}")
    for name, found in here.items():
        for _, section in (*found, *there[name]):
            _check_same_shape(found[0][1], section)


def _parts(sources: Sequence[tuple[int, Section]], wanted: Section, turn: int) -> Iterator[tuple[int, Shard]]:
    """Who sends which part of a destination's section: a part is cut by no source's border."""
    for part in wanted.shard.cut(section.shard for _, section in sources):
        having = [number for number, section in sources if section.shard.covers(part)]
        if not having:
            every = "; ".join(section.describe() for _, section in sources)
            raise LayoutError(
                f"no source rank has layer {part.layer_start}, KV head {part.head_start}. "
                f"Destination: {wanted.describe()}. Sources: {every}"
            )
        yield having[turn % len(having)], part


def _check_same_shape(one: Section, other: Section) -> None:
    fields = ("name", "model_layers", "model_heads", "k_dim", "v_dim", "itemsize", "is_whole", "is_windowed")
    different = [name for name in fields if getattr(one, name) != getattr(other, name)]
    if different:
        raise LayoutError(f"{', '.join(different)} differ: {one.describe()}; and {other.describe()}")


def pair_sections(source: RankLayout, destination: RankLayout, parts: Sequence[Shard | None]) -> Pairings:
    """How the sections of two ranks lie in each other.

    Args:
        parts: as in `Route`.

    Raises:
        LayoutError: the source lacks a section or a part of it, or the sides differ in what cannot be mapped.
    """
    if len(parts) != len(destination.sections):
        raise LayoutError(f"{len(parts)} parts of {len(destination.sections)} sections")
    found: Pairings = {}
    for number, (section, part) in enumerate(zip(destination.sections, parts, strict=True)):
        if part is None:
            continue
        own = source.index(section.name)
        if own is None:
            every = "; ".join(other.describe() for other in source.sections)
            raise LayoutError(f"the source has no {section.describe()}; it has {every}")
        found[number] = own, Pairing(source.sections[own], section, part)
    return found


class Pairing:
    """A section of two ranks, and how the bytes of a block of one lie in the blocks of the other.

    Args:
        part: layers and heads that are sent; both ranks must have them.

    Raises:
        LayoutError: the sides differ in what cannot be mapped.
    """

    def __init__(self, source: Section, destination: Section, part: Shard) -> None:
        _check_same_shape(source, destination)
        self.layers = part.layers
        for side in (source, destination):
            if not side.shard.covers(part):
                raise LayoutError(f"{part} asks for what a rank has not: {side.describe()}")
        self.unit = gcd(source.block_tokens, destination.block_tokens)
        """Tokens that are moved together."""
        self._sides = (source, destination)
        self._check_fills_blocks()
        self._runs = _Runs(source, destination, part.heads, self.unit)
        self._check_runs()

    def covering(self, tokens: range) -> range:
        """What is moved where these are wanted: from the beginning of the first one's unit on."""
        return range(tokens.start // self.unit * self.unit, tokens.stop) if tokens else tokens

    def checksum_tokens(self, page_tokens: int) -> int:
        """Tokens that share a checksum where pages of `page_tokens` are asked for: whole units. Both sides use it."""
        return -(-page_tokens // self.unit) * self.unit

    def copies(
        self,
        layers: range,
        first_token: int,
        stop_token: int,
        source_blocks: Sequence[int],
        destination_blocks: Sequence[int],
    ) -> Copies:
        """Pieces for tokens `[first_token, stop_token)` of some layers, as few as both sides' memory allows.

        Args:
            layers: numbers in the model, inside the part.
            first_token: counted from the request's first token, a multiple of `unit`.
            stop_token: also one, or the request's end.
            source_blocks, destination_blocks: the request's whole block tables; entry i holds tokens
                `[i * block_tokens, (i + 1) * block_tokens)` of its own side.

        Raises:
            LayoutError: layers outside of the part, tokens that a table does not cover or that cut a unit.
        """
        source, destination, nbytes = self._one_layer(first_token, stop_token, source_blocks, destination_blocks)
        bases = [self._bases(side, layers) for side in (0, 1)]
        if len(layers) > 1 and len(nbytes) and _contiguous(bases, nbytes):
            bases, nbytes = [base[:1] for base in bases], nbytes * len(layers)
            source, destination, nbytes = coalesce(source, destination, nbytes)
        return Copies(
            source=(bases[0][:, None] + source).ravel(),
            destination=(bases[1][:, None] + destination).ravel(),
            nbytes=np.tile(nbytes, len(bases[0])),
        )

    def source_pages(
        self, layers: range, first_token: int, stop_token: int, source_blocks: Sequence[int], page_tokens: int
    ) -> PageRuns:
        """What each page's checksum is taken over at the source: the bytes that `copies` of the same part moves.

        Args:
            page_tokens: tokens of a page, a multiple of `unit`; pages begin at multiples of it.
        """
        return self._pages(0, layers, first_token, stop_token, source_blocks, page_tokens)

    def destination_pages(
        self, layers: range, first_token: int, stop_token: int, destination_blocks: Sequence[int], page_tokens: int
    ) -> PageRuns:
        """The same bytes in the same order at the destination."""
        return self._pages(1, layers, first_token, stop_token, destination_blocks, page_tokens)

    def _one_layer(
        self, first_token: int, stop_token: int, source_blocks: Sequence[int], destination_blocks: Sequence[int]
    ) -> tuple[Int64, Int64, Int64]:
        units = self._units(first_token, stop_token)
        index, owner = self._runs.of(units)
        offsets = [
            self._block_offsets(side, units, table)[owner] + self._runs.offsets[side][index]
            for side, table in enumerate((source_blocks, destination_blocks))
        ]
        return coalesce(offsets[0], offsets[1], self._runs.nbytes[index])

    def _pages(
        self, side: int, layers: range, first_token: int, stop_token: int, block_ids: Sequence[int], page_tokens: int
    ) -> PageRuns:
        if page_tokens < 1 or page_tokens % self.unit:
            raise LayoutError(f"pages of {page_tokens} tokens where {self.unit} are moved together")
        units = self._units(first_token, stop_token)
        index, owner = self._runs.of(units)
        offsets = self._block_offsets(side, units, block_ids)[owner] + self._runs.offsets[side][index]
        base = self._bases(side, layers)
        page = (units * self.unit // page_tokens)[owner]
        order = np.argsort(np.tile(page, len(base)), kind="stable")  # page by page, in each the layers in turn
        counts = np.unique(page, return_counts=True)[1] * len(base)
        return PageRuns(
            addresses=(base[:, None] + offsets).ravel()[order],
            nbytes=np.tile(self._runs.nbytes[index], len(base))[order],
            bounds=np.concatenate(([0], np.cumsum(counts))),
        )

    def _units(self, first_token: int, stop_token: int) -> Int64:
        if first_token % self.unit or not 0 <= first_token <= stop_token:
            raise LayoutError(f"tokens {first_token}..{stop_token - 1} where {self.unit} are moved together")
        return np.arange(first_token // self.unit, -(-stop_token // self.unit), dtype=np.int64)

    def _block_offsets(self, side: int, units: Int64, block_ids: Sequence[int]) -> Int64:
        """For each unit the offset of the block that it lies in. What else the table has is not looked at."""
        layout = self._sides[side]
        table = np.asarray(block_ids, dtype=np.int64)
        places = units * self.unit // layout.block_tokens
        if len(places) and places[-1] >= len(table):
            raise LayoutError(
                f"{len(table)} blocks of {layout.block_tokens} tokens end before token {units[-1] * self.unit}"
            )
        if len(places) and (gone := table[places] == NO_BLOCK).any():
            raise LayoutError(f"the engine has no block any more for token {units[gone][0] * self.unit}")
        return layout.check_blocks(table[places]) * layout.blocks.block_stride

    def _bases(self, side: int, layers: range) -> Int64:
        if not self.layers.start <= layers.start < layers.stop <= self.layers.stop:
            raise LayoutError(f"layers {layers}; the part has {self.layers}")
        layout = self._sides[side]
        first = layers.start - layout.shard.layer_start
        return np.array(layout.blocks.layer_addresses[first : first + len(layers)], dtype=np.int64)

    def _check_fills_blocks(self) -> None:
        """The block that a window begins in comes whole: the destination's engine may give it to other requests."""
        source, destination = self._sides
        if destination.is_windowed and self.unit < destination.block_tokens:
            raise LayoutError(
                f"the source may have nothing of a window's first block of {destination.block_tokens} tokens but its "
                f"end: expected a block size at the destination that divides the source's, {source.block_tokens}. "
                f"Source: {source.describe()}. Destination: {destination.describe()}"
            )

    def _check_runs(self) -> None:
        source, destination = self._sides
        smallest = min(source.k_dim, source.v_dim or source.k_dim) * source.itemsize
        if self._runs.nbytes.min() < min(_MIN_RUN_NBYTES, smallest):
            raise LayoutError(
                f"the sides order the elements of a block differently, so that pieces would have "
                f"{self._runs.nbytes.min()} bytes. Source: {source.describe()}, {source.blocks.k}, {source.blocks.v}. "
                f"Destination: {destination.describe()}, {destination.blocks.k}, {destination.blocks.v}"
            )


Pairings: TypeAlias = dict[int, tuple[int, Pairing]]
"""By the destination's number of a section the source's number of it and the pairing, where anything of it is sent."""


class _Runs:
    """The contiguous runs that units consist of, all heads of one layer.

    Units lie at several places inside the blocks of both sides; which ones they meet repeats after `phases` units.
    `offsets` are from the block's start, source and destination; those of a phase ascend at the destination.
    """

    def __init__(self, source: Section, destination: Section, heads: range, unit: int) -> None:
        per_block = [side.block_tokens // unit for side in (source, destination)]
        phases = per_block[0] * per_block[1]  # without a common divisor, by the choice of `unit`
        period = lcm(source.block_tokens, destination.block_tokens) * (source.k_dim + source.v_dim)
        if phases > _MAX_PHASES or period > _MAX_ELEMENTS:
            raise LayoutError(f"block sizes with too little in common: {source.describe()}; {destination.describe()}")
        elements = [element_offsets(side) for side in (source, destination)]
        found, room = [], _MAX_ELEMENTS
        for phase in range(phases):
            places = [part[phase % n * unit :][:unit].ravel() for part, n in zip(elements, per_block, strict=True)]
            found.append(_run_heads(places, (source, destination), heads, room))
            room -= len(found[-1][2])
        self.offsets = [np.concatenate([runs[side] for runs in found]) for side in (0, 1)]
        self.nbytes = np.concatenate([runs[2] for runs in found])
        self._counts = np.array([len(runs[2]) for runs in found], dtype=np.int64)
        self._starts = np.cumsum(self._counts) - self._counts

    def of(self, units: Int64) -> tuple[Int64, Int64]:
        """The runs of these units in order: (number of the run, position of its unit in `units`)."""
        phase = units % len(self._counts)
        counts = self._counts[phase]
        owner = np.repeat(np.arange(len(units), dtype=np.int64), counts)
        ends = np.cumsum(counts)
        within = np.arange(len(owner), dtype=np.int64) - (ends - counts)[owner]
        return self._starts[phase][owner] + within, owner


def _run_heads(
    places: list[Int64], sides: tuple[Section, Section], heads: range, room: int
) -> tuple[Int64, Int64, Int64]:
    """Runs of the elements at `places` of a head, for all heads. Raises LayoutError for more than `room`."""
    order = np.argsort(places[1], kind="stable")
    size = np.full(len(order), sides[0].itemsize, dtype=np.int64)
    source, destination, nbytes = coalesce(places[0][order], places[1][order], size)
    if len(nbytes) * len(heads) > room:
        raise LayoutError(
            f"the sides order the elements of a block differently, in more than {_MAX_ELEMENTS} pieces: "
            f"{sides[0].describe()}; {sides[1].describe()}"
        )
    starts = [
        (np.array(heads, dtype=np.int64) - side.shard.head_start)[:, None] * side.blocks.head_stride + offsets
        for side, offsets in zip(sides, (source, destination), strict=True)
    ]
    order = np.argsort(starts[1].ravel(), kind="stable")
    return coalesce(starts[0].ravel()[order], starts[1].ravel()[order], np.tile(nbytes, len(heads))[order])


def coalesce(source: Int64, destination: Int64, nbytes: Int64) -> tuple[Int64, Int64, Int64]:
    """Make one of neighbours that follow each other on both sides."""
    if len(nbytes) < 2:
        return source, destination, nbytes
    joined = (source[1:] == source[:-1] + nbytes[:-1]) & (destination[1:] == destination[:-1] + nbytes[:-1])
    if not joined.any():
        return source, destination, nbytes
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return source[first], destination[first], np.add.reduceat(nbytes, first)


def _contiguous(bases: list[Int64], nbytes: Int64) -> bool:
    """Whether every piece ends where the same piece of the next layer begins, on both sides."""
    return bool((nbytes == nbytes[0]).all()) and all((np.diff(base) == nbytes[0]).all() for base in bases)
