"""What one SGLang rank hands over, as sections: the KV of its layers, its state, and the aux row of a request.

SGLang names memory by addresses (`KVArgs`): one buffer for each layer of K, then of V (MLA: one for each layer), of
pages `[token][head][dim]`; for each kind of state one buffer a layer and kind, of items; and aux buffers, of one row a
request. K and V are sections of their own, since nothing says how far apart they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import BlockLayout, SegmentLayout
from transfer.plan.layout import MAX_TABLE_BLOCKS, LayoutError, RankLayout, Section, Table

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs

_LARGEST_UNIT = 16
"""Bytes that are moved as one element at most; nothing here knows what a number means."""
_WHOLE_SEQUENCE = ("mamba", "dsa_tail", "qsa_pending", "c128_state", "request_row")
"""State of a request as a whole, the same however long a prefix the decode instance has. Other kinds cover tokens."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this is, and what of the model it has.

    Args:
        num_layers, num_heads: of the whole model; MLA has one head, which each rank has.
        stage, num_stages: of the pipeline.
        first_layer: the number of the stage's first one.
    """

    tp_rank: int
    tp_size: int
    num_layers: int
    num_heads: int
    is_mla: bool
    stage: int = 0
    num_stages: int = 1
    first_layer: int = 0

    @property
    def heads(self) -> range:
        """KV heads of this rank; with more ranks than heads, ranks that follow each other have the same."""
        if self.is_mla:
            return range(1)
        count = max(1, self.num_heads // self.tp_size)
        first = self.tp_rank * self.num_heads // self.tp_size
        return range(first, first + count)

    @property
    def has_aux(self) -> bool:
        """Every stage fills a request's aux row in; the last one's is handed over."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers of one kind of which each has as many items of as many bytes."""

    addresses: tuple[int, ...]
    num_items: int
    item_nbytes: int


class RankMemory:
    """The sections of one rank, the memory that they are in, and the tables of a request's pages.

    Args:
        aux_addresses: of the aux buffers, where these are not SGLang's own.

    Raises:
        LayoutError: buffers that cannot be described.
    """

    def __init__(self, args: KVArgs, place: Place, aux_addresses: Sequence[int] | None = None) -> None:
        self.page_tokens = args.page_size
        kv = _kv_sections(args, place)
        self.num_kv = len(kv)
        """The first sections are KV, whose pages are named alike."""
        state: list[Section] = []
        self._state_of: list[int] = []
        """For each section of state, which component of SGLang's it is of."""
        for number, kind in enumerate(args.state_types):
            of_tensors = args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number]
            for buffers in _alike(*of_tensors):
                state.append(_rows(f"{kind.value} {number} of {buffers.item_nbytes}", buffers, place))
                self._state_of.append(number)
        self.covers_tokens = any(kind.value not in _WHOLE_SEQUENCE for kind in args.state_types)
        at = args.aux_data_ptrs if aux_addresses is None else aux_addresses
        of_rows = _alike(at, args.aux_data_lens, args.aux_item_lens) if place.has_aux else []
        aux = [_rows(f"aux of {buffers.item_nbytes}", buffers, None) for buffers in of_rows]
        self._num_aux = len(aux)
        self.layout = RankLayout((*kv, *state, *aux))
        state_memory = [pair for ptrs, lens in zip(args.state_data_ptrs, args.state_data_lens, strict=True)
                        for pair in zip(ptrs, lens, strict=True)]  # fmt: skip
        self.regions = _apart([
            *zip(args.kv_data_ptrs, args.kv_data_lens, strict=True),
            *state_memory,
            *zip(at, args.aux_data_lens, strict=True),
        ])  # fmt: skip

    @property
    def kv(self) -> range:
        """Numbers of the sections of KV."""
        return range(self.num_kv)

    def last_layer(self, section: int) -> int:
        return self.layout.sections[section].shard.layer_stop - 1

    def tables(
        self,
        pages: Sequence[int],
        aux_index: int | None,
        state: Sequence[Sequence[int] | None] | None,
        first_token: int = 0,
    ) -> list[Table]:
        """What a request has in this rank: one table for each section.

        Args:
            pages: of the tokens from `first_token` on.
            state: indices of each component, None for those without.

        Raises:
            LayoutError: `first_token` does not begin a page; there are more pages than a message takes; or state that
                covers tokens is wanted from there on: the other side does not know where that begins.
        """
        if first_token % self.page_tokens:
            raise LayoutError(f"a prefix of {first_token} tokens, which pages of {self.page_tokens} do not end at")
        if first_token and self.covers_tokens:
            raise LayoutError("the decode instance has a prefix, and the model's state covers tokens")
        whole = [0] * (first_token // self.page_tokens) + list(pages)
        if len(whole) > MAX_TABLE_BLOCKS:
            raise LayoutError(f"{len(whole)} pages of a request: at most {MAX_TABLE_BLOCKS}; take larger pages")
        kv = Table(first_token, len(whole) * self.page_tokens, whole)
        rows = [_row_table(_component(state, number)) for number in self._state_of]
        return [*[kv] * self.num_kv, *rows, *[_row_table([] if aux_index is None else [aux_index])] * self._num_aux]


def _component(state: Sequence[Sequence[int] | None] | None, number: int) -> Sequence[int]:
    given = None if state is None or number >= len(state) else state[number]
    return [] if given is None else given


def _row_table(rows: Sequence[int]) -> Table:
    return Table(0, len(rows), [int(row) for row in rows])


def _kv_sections(args: KVArgs, place: Place) -> list[Section]:
    """K and V of the model's own layers, and those of a draft model, which come last."""
    count = len(args.kv_data_ptrs) - args.num_draft_entries
    sections: list[Section] = []
    for prefix, part in (("", slice(0, count)), ("draft ", slice(count, None))):
        ptrs, lens, items = args.kv_data_ptrs[part], args.kv_data_lens[part], args.kv_item_lens[part]
        middle = len(ptrs) if place.is_mla else len(ptrs) // 2
        for name, half in (("k", slice(0, middle)), ("v", slice(middle, None))):
            alike = _alike(ptrs[half], lens[half], items[half])
            if place.num_stages > 1 and len(alike) > 1:
                raise LayoutError("layers of different sizes in a pipeline: nothing says which layer a buffer is of")
            for number, buffers in enumerate(alike):
                named = f"{prefix}{name}" if not number else f"{prefix}{name} {number}"
                if prefix:
                    sections.append(_rows(named, buffers, place, is_whole=False, tokens=args.page_size))
                else:
                    sections.append(_pages(named, buffers, place, args.page_size))
    return sections


def _pages(name: str, buffers: _Buffers, place: Place, page_tokens: int) -> Section:
    """KV of whole layers: pages of `[token][head][dim]`."""
    heads = place.heads
    head_nbytes, rest = divmod(buffers.item_nbytes, page_tokens * len(heads))
    if rest or not head_nbytes:
        raise LayoutError(f"pages of {buffers.item_nbytes} bytes for {page_tokens} tokens of {len(heads)} KV heads")
    unit = gcd(head_nbytes, _LARGEST_UNIT)
    segment = SegmentLayout(
        0, ((page_tokens, head_nbytes * len(heads)),), ((head_nbytes // unit, unit),)
    )
    return Section(
        name=name,
        model_layers=place.num_layers,
        model_heads=1 if place.is_mla else place.num_heads,
        shard=Shard(place.first_layer, place.first_layer + len(buffers.addresses), heads.start, heads.stop),
        k_dim=head_nbytes // unit,
        v_dim=0,
        itemsize=unit,
        blocks=BlockLayout(
            buffers.addresses, buffers.num_items, page_tokens, buffers.item_nbytes, head_nbytes, segment, None
        ),
    )


def _rows(
    name: str, buffers: _Buffers, place: Place | None, *, is_whole: bool = True, tokens: int = 1
) -> Section:
    """Items whose inside is not known. Each TP rank's are its own, and go to the same rank of as many ranks.

    Args:
        place: None where each rank has the same.
        tokens: that share an item.
    """
    unit = gcd(buffers.item_nbytes // tokens, _LARGEST_UNIT)
    elements = buffers.item_nbytes // tokens // unit
    rank, ranks = (0, 1) if place is None else (place.tp_rank, place.tp_size)
    segment = SegmentLayout(0, ((tokens, elements * unit),), ((elements, unit),))
    return Section(
        name=name,
        model_layers=len(buffers.addresses),
        model_heads=ranks,
        shard=Shard(0, len(buffers.addresses), rank, rank + 1),
        k_dim=elements,
        v_dim=0,
        itemsize=unit,
        blocks=BlockLayout(
            buffers.addresses, buffers.num_items, tokens, buffers.item_nbytes, buffers.item_nbytes, segment, None
        ),
        is_whole=is_whole,
    )


def _alike(addresses: Sequence[int], sizes: Sequence[int], item_sizes: Sequence[int]) -> list[_Buffers]:
    """Buffers by the size of their items and how many they are, in the order in which each size comes first."""
    found: dict[tuple[int, int], list[int]] = {}
    for address, nbytes, item_nbytes in zip(addresses, sizes, item_sizes, strict=True):
        found.setdefault((nbytes // item_nbytes, item_nbytes), []).append(address)
    return [_Buffers(tuple(at), count, item_nbytes) for (count, item_nbytes), at in found.items()]


def _apart(regions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Regions of which none overlaps: those that do are made one."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(set(regions)):
        if found and address < found[-1][0] + found[-1][1]:
            first, size = found[-1]
            found[-1] = first, max(size, address + nbytes - first)
        elif nbytes:
            found.append((address, nbytes))
    return found
