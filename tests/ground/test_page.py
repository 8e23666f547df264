"""Canonical pages against a slow model of them: plain loops over addresses, written without a look at page.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mooncake_connector.errors import PageError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import (
    Axis,
    BlockLayout,
    PageFormat,
    Part,
    SegmentLayout,
    factor_axis,
    factor_block,
    fit,
    pack,
    unpack,
)

Bytes = npt.NDArray[np.uint8]


# The model


def axis_offset(axis: Axis, index: int) -> int:
    """Where index `index` of a nested axis lies: its digits in mixed radix, innermost last, times the strides."""
    offset = 0
    for size, stride in reversed(axis):
        index, digit = divmod(index, size)
        offset += digit * stride
    assert index == 0
    return offset


def engine_address(layout: BlockLayout, segment: SegmentLayout, layer: int, block: int, head: int, place: int) -> int:
    return (
        layout.layer_addresses[layer]
        + block * layout.block_stride
        + head * layout.head_stride
        + segment.offset
        + axis_offset(segment.token, place)
    )


def pairs(case: Case, fmt: PageFormat, own: Shard, stored: Shard, skip: int = 0) -> list[tuple[int, int]]:
    """Every byte of a page of `stored` that an engine with `own` has a place for: (offset in the page, address)."""
    found = []
    offset = 0
    layout = case.layout
    for segment, dim in ((layout.k, fmt.k_dim), (layout.v, fmt.v_dim)):
        for layer, token, head, element in np.ndindex(stored.num_layers, fmt.page_tokens, stored.num_heads, dim):
            block, place = divmod(case.first_token + token, layout.block_tokens)
            layer_in, head_in = layer + stored.layer_start, head + stored.head_start
            if layer_in in own.layers and head_in in own.heads and token >= skip:
                assert segment is not None
                mine = layer_in - own.layer_start, head_in - own.head_start
                base = engine_address(layout, segment, mine[0], case.table[block], mine[1], place)
                for byte in range(fmt.itemsize):
                    found.append((offset + byte, base + axis_offset(segment.dim, element) + byte))
            offset += fmt.itemsize
    assert offset == fmt.nbytes
    return found


# Engines as they may come


@dataclass
class Case:
    """An engine's memory with a request in it; `guard` bytes around the blocks belong to nobody."""

    fmt: PageFormat
    layout: BlockLayout
    memory: Bytes
    table: list[int]
    first_token: int
    skip: int

    def at(self, address: int) -> int:
        return address - self.memory.ctypes.data


def splits(draw: st.DrawFn, size: int) -> list[int]:
    """`size` as a product of one to three factors."""
    factors = []
    while size > 1 and len(factors) < 2 and draw(st.booleans()):
        factor = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        factors.append(factor)
        size //= factor
    return [*factors, size]


def nested(draw: st.DrawFn, sizes: dict[str, list[int]], unit: int) -> tuple[dict[str, Axis], int]:
    """Axes of a dense packing whose factors are interleaved in any order, and its extent in bytes."""
    order = draw(st.permutations([(name, i) for name, factors in sizes.items() for i in range(len(factors))]))
    strides: dict[tuple[str, int], int] = {}
    for name, i in reversed(order):
        strides[name, i] = unit
        unit *= sizes[name][i]
    return {name: tuple((n, strides[name, i]) for i, n in enumerate(sizes[name])) for name in sizes}, unit


@st.composite
def cases(draw: st.DrawFn) -> Case:
    itemsize = draw(st.sampled_from([1, 2, 4]))
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    fmt = PageFormat(
        num_layers=draw(st.integers(1, 3)),
        page_tokens=draw(st.sampled_from([1, 2, 4, 8])),
        num_heads=draw(st.integers(1, 3)),
        k_dim=draw(st.sampled_from([1, 2, 4, 6])),
        v_dim=draw(st.sampled_from([0, 1, 2, 4])),
        itemsize=itemsize,
    )
    segments: list[SegmentLayout | None] = []
    extent = draw(st.integers(0, 3)) * itemsize
    for dim in (fmt.k_dim, fmt.v_dim):
        if dim == 0:
            segments.append(None)
            continue
        axes, nbytes = nested(draw, {"token": splits(draw, block_tokens), "dim": splits(draw, dim)}, itemsize)
        segments.append(SegmentLayout(extent, axes["token"], axes["dim"]))
        extent += nbytes + draw(st.integers(0, 2)) * itemsize
    k, v = segments
    assert k is not None
    num_blocks = draw(st.integers(4, 6))
    outer, total = nested(draw, {"layer": [fmt.num_layers], "block": [num_blocks], "head": [fmt.num_heads]}, extent)
    guard = 16
    memory = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, total + 2 * guard, dtype=np.uint8)
    base = memory.ctypes.data + guard
    layers = draw(st.permutations(range(fmt.num_layers)))  # not equally spaced, and in any order
    layout = BlockLayout(
        layer_addresses=tuple(base + layer * outer["layer"][0][1] for layer in layers),
        num_blocks=num_blocks,
        block_tokens=block_tokens,
        block_stride=outer["block"][0][1],
        head_stride=outer["head"][0][1],
        k=k,
        v=v,
    )
    first_token = draw(st.integers(0, 2 * block_tokens))
    needed = -(-(first_token + fmt.page_tokens) // block_tokens)
    table = draw(st.permutations(range(num_blocks))) * (needed // num_blocks + 1)
    return Case(fmt, layout, memory, list(table[:needed]), first_token, draw(st.integers(0, fmt.page_tokens)))


@st.composite
def shards(draw: st.DrawFn) -> tuple[Case, Shard, Shard]:
    """An engine, the shard that it holds, and another one that has something in common with it."""
    case = draw(cases())
    starts = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    own = Shard(starts[0], starts[0] + case.fmt.num_layers, starts[1], starts[1] + case.fmt.num_heads)
    layer, head = draw(st.sampled_from(own.layers)), draw(st.sampled_from(own.heads))
    first = draw(st.integers(0, layer)), draw(st.integers(0, head))
    last = draw(st.integers(layer, own.layer_stop + 1)), draw(st.integers(head, own.head_stop + 1))
    return case, own, Shard(first[0], last[0] + 1, first[1], last[1] + 1)


def whole(case: Case) -> Shard:
    return Shard(0, case.fmt.num_layers, 0, case.fmt.num_heads)


@given(cases())
def test_pack_collects_every_byte_of_the_page_from_its_place(case):
    page = np.full(case.fmt.nbytes, 0xEE, dtype=np.uint8)
    before = case.memory.copy()
    pack(case.fmt, case.layout, case.table, case.first_token, page)
    for offset, address in pairs(case, case.fmt, whole(case), whole(case)):
        assert page[offset] == case.memory[case.at(address)]
    assert np.array_equal(case.memory, before)


@given(shards(), st.booleans())
def test_unpack_writes_what_page_and_blocks_have_in_common_once_and_no_other_byte(drawn, is_own):
    """A table that names a block twice would be written twice; an engine's never does."""
    case, own, stored = drawn
    case.table = list(dict.fromkeys(case.table))
    if case.first_token + case.fmt.page_tokens > len(case.table) * case.layout.block_tokens:
        return
    fmt, part = (case.fmt, None) if is_own else fit(case.fmt, own, stored)
    page = np.random.default_rng(1).integers(0, 256, fmt.nbytes, dtype=np.uint8)
    expected = case.memory.copy()
    written = pairs(case, fmt, own, own if is_own else stored, case.skip)
    assert len({address for _, address in written}) == len(written), "the model itself writes a byte twice"
    for offset, address in written:
        expected[case.at(address)] = page[offset]
    unpack(fmt, case.layout, case.table, case.first_token, page, case.skip, part)
    assert np.array_equal(case.memory, expected)


@given(cases())
def test_unpack_is_the_inverse_of_pack(case):
    page, again = np.empty((2, case.fmt.nbytes), dtype=np.uint8)
    pack(case.fmt, case.layout, case.table, case.first_token, page)
    before, packed = case.memory.copy(), page.copy()
    case.memory[16:-16] = 0
    unpack(case.fmt, case.layout, case.table, case.first_token, page)
    for _, address in pairs(case, case.fmt, whole(case), whole(case)):
        assert case.memory[case.at(address)] == before[case.at(address)]
    pack(case.fmt, case.layout, case.table, case.first_token, again)
    assert np.array_equal(again, packed)


def test_shards_without_anything_in_common_do_not_fit():
    with pytest.raises(PageError, match="nothing in common"):
        fit(PageFormat(2, 16, 4, 2, 2, 2), Shard(0, 2, 0, 4), Shard(2, 4, 0, 4))


def test_the_canonical_order_is_k_then_v_by_layer_token_head_and_element():
    """Golden page: each element says where it comes from, in an engine that keeps heads outside tokens."""
    fmt = PageFormat(num_layers=2, page_tokens=2, num_heads=2, k_dim=2, v_dim=1, itemsize=2)
    memory = np.zeros((2, 1, 2, 2, 3), dtype="<u2")  # layer, block, head, token, K‖V
    for layer, _, head, token, element in np.ndindex(memory.shape):
        memory[layer, 0, head, token, element] = 1000 * layer + 100 * token + 10 * head + element
    layer_stride, block_stride, head_stride, token_stride, _ = memory.strides
    axes = ((2, token_stride),)
    layout = BlockLayout(
        layer_addresses=(memory.ctypes.data, memory.ctypes.data + layer_stride),
        num_blocks=1,
        block_tokens=2,
        block_stride=block_stride,
        head_stride=head_stride,
        k=SegmentLayout(0, axes, ((2, 2),)),
        v=SegmentLayout(4, axes, ((1, 2),)),
    )
    page = np.empty(fmt.nbytes, dtype=np.uint8)
    pack(fmt, layout, [0], 0, page)
    k = [0, 1, 10, 11, 100, 101, 110, 111, 1000, 1001, 1010, 1011, 1100, 1101, 1110, 1111]
    v = [2, 12, 102, 112, 1002, 1012, 1102, 1112]
    assert page.view("<u2").tolist() == k + v
    assert fmt.nbytes == 48 and fmt.k_nbytes == 32


def test_long_rows_are_moved_whole():
    """A row wider than the widest item, and one just as wide."""
    for k_dim in (2048, 2049, 5000):
        fmt = PageFormat(num_layers=1, page_tokens=2, num_heads=1, k_dim=k_dim, v_dim=0, itemsize=2)
        memory = np.random.default_rng(0).integers(0, 256, (3, 2, k_dim * 2), dtype=np.uint8)
        layout = BlockLayout(
            (memory.ctypes.data,), 3, 2, 4 * k_dim, 4 * k_dim, SegmentLayout(0, ((2, 2 * k_dim),), ((k_dim, 2),)), None
        )
        page = np.empty(fmt.nbytes, dtype=np.uint8)
        pack(fmt, layout, [2], 0, page)
        assert bytes(page) == bytes(memory[2])


# Errors: an adapter's mistake must not reach memory that is not its own


@pytest.fixture
def small() -> Case:
    fmt = PageFormat(num_layers=2, page_tokens=4, num_heads=1, k_dim=2, v_dim=2, itemsize=1)
    memory = np.zeros(2 * 4 * 16, dtype=np.uint8)
    k, v = SegmentLayout(0, ((4, 4),), ((2, 1),)), SegmentLayout(2, ((4, 4),), ((2, 1),))
    base = memory.ctypes.data
    return Case(fmt, BlockLayout((base, base + 64), 4, 4, 16, 16, k, v), memory, [1, 2], 0, 0)


@pytest.mark.parametrize(
    ("table", "first_token", "says"),
    [
        ([1], 2, "does not cover"),
        ([], 0, "does not cover"),
        ([4], 0, "block id 4"),
        ([-1], 0, "block id -1"),
        ([1, 99], 2, "block id 99"),
    ],
)
@pytest.mark.parametrize("move", [pack, unpack])
def test_a_table_that_leads_elsewhere_is_refused(small, move, table, first_token, says):
    with pytest.raises(PageError, match=says):
        move(small.fmt, small.layout, table, first_token, np.zeros(small.fmt.nbytes, dtype=np.uint8))


@pytest.mark.parametrize("move", [pack, unpack])
def test_a_page_of_another_size_or_with_gaps_is_refused(small, move):
    with pytest.raises(PageError, match="expected 32"):
        move(small.fmt, small.layout, [1], 0, np.zeros(31, dtype=np.uint8))
    with pytest.raises(PageError, match="contiguous"):
        move(small.fmt, small.layout, [1], 0, np.zeros(64, dtype=np.uint8)[::2])


def test_a_layout_of_other_layers_is_refused(small):
    fmt = PageFormat(num_layers=3, page_tokens=4, num_heads=1, k_dim=2, v_dim=2, itemsize=1)
    with pytest.raises(PageError, match="2 layers, the page 3"):
        pack(fmt, small.layout, [1], 0, np.zeros(fmt.nbytes, dtype=np.uint8))


@pytest.mark.parametrize(
    "page, blocks",
    [((1, 3, 0, 1), (0, 2, 0, 1)), ((0, 2, 0, 2), (0, 2, 0, 2)), ((0, 2, 0, 1), (1, 3, 0, 1))],
)
def test_a_part_that_leaves_the_page_or_the_blocks_is_refused(small, page, blocks):
    buffer = np.zeros(small.fmt.nbytes, dtype=np.uint8)
    with pytest.raises(PageError, match="the blocks 2 layers"):
        unpack(small.fmt, small.layout, [1], 0, buffer, part=Part(Shard(*page), Shard(*blocks)))


@pytest.mark.parametrize("field", ["num_layers", "page_tokens", "num_heads", "k_dim", "itemsize"])
def test_a_format_without_extent_is_refused(field):
    sizes = {"num_layers": 1, "page_tokens": 1, "num_heads": 1, "k_dim": 1, "v_dim": 0, "itemsize": 1}
    with pytest.raises(PageError, match=f"{field}=0"):
        PageFormat(**sizes | {field: 0})
    with pytest.raises(PageError, match="v_dim=-1"):
        PageFormat(**sizes | {"v_dim": -1})


# Measured orders


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    sizes = splits(draw, draw(st.integers(2, 48)))
    found, _ = nested(draw, {"axis": sizes, "other": splits(draw, draw(st.integers(1, 6)))}, 1)
    return found["axis"]


@given(axes())
@example(((2, 8), (4, 1)))
@example(((4, 1), (2, 4)))
def test_factor_axis_finds_an_axis_that_visits_the_same_places(axis):
    length = int(np.prod([size for size, _ in axis]))
    positions = np.array([axis_offset(axis, index) for index in range(length)], dtype=np.int64)
    found = factor_axis(positions)
    assert found is not None
    assert int(np.prod([size for size, _ in found])) == length
    assert [axis_offset(found, index) for index in range(length)] == positions.tolist()


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=12))
def test_factor_axis_never_answers_wrongly(positions):
    found = factor_axis(np.array(positions, dtype=np.int64))
    if found is not None:
        assert [axis_offset(found, index) for index in range(len(positions))] == positions


@given(st.data())
def test_factor_block_finds_every_nested_packing(data):
    num_tokens, dim = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    packing, _ = nested(data.draw, {"token": splits(data.draw, num_tokens), "dim": splits(data.draw, dim)}, 1)
    first = data.draw(st.integers(0, 5))

    def places(offset: int, tokens: Axis, elements: Axis) -> list[list[int]]:
        return [
            [offset + axis_offset(tokens, token) + axis_offset(elements, element) for element in range(dim)]
            for token in range(num_tokens)
        ]

    positions = places(first, packing["token"], packing["dim"])
    found = factor_block(np.array(positions, dtype=np.int64))
    assert found is not None
    assert found[0] == first
    assert places(*found) == positions


@pytest.mark.parametrize(
    "positions",
    [[[0, 1], [3, 2]], [[0, 2], [1, 4]], [[0, 1, 3], [4, 5, 7]]],
    ids=["not separable", "shifted", "uneven"],
)
def test_an_order_that_is_not_nested_has_no_factors(positions):
    assert factor_block(np.array(positions, dtype=np.int64)) is None


def test_no_positions_and_one_position():
    assert factor_axis(np.array([], dtype=np.int64)) is None
    assert factor_axis(np.array([3], dtype=np.int64)) is None
    assert factor_axis(np.array([0], dtype=np.int64)) == ((1, 0),)
