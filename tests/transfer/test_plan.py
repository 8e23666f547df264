"""Routes and copies against a plain model of memory: every byte of every destination block is written exactly once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples
from simulated.ranks import (
    SMALL,
    TOKENS,
    Instance,
    Model,
    heads_of,
    instances,
    make_rank,
    models,
    tp_sizes,
    whole_ranks,
)

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import SegmentLayout
from transfer.plan.layout import NO_BLOCK, LayoutError, RankLayout, Section, Table
from transfer.plan.pairing import Copies, Pairing, Route, pair_sections, routes

ONE = Shard(0, 1, 0, 1)
SINGLE = make_rank(Model(layers=1, heads=1, k_dim=2, v_dim=2, itemsize=2), range(1), range(1), 4, 4)
"""Of one layer and head."""


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Instance, Instance, int]:
    """Two instances of one model and a request's length; TP, PP, block sizes and memory order of each are its own."""
    model = draw(models)
    group = draw(st.sampled_from([0, 0, 0, 2]))
    common = draw(st.sampled_from([2, 4] if group else [1, 2, 3]))
    ratios = draw(st.sampled_from([(1, 1), (1, 1), (1, 2), (4, 1), (2, 3), (3, 2), (1, 6)]))
    tokens = draw(st.integers(1, 30))
    source, destination = (draw(instances(model, common * ratio, tokens, group)) for ratio in ratios)
    return source, destination, tokens


def routes_of(sources: list[Section], destinations: list[Section]) -> list[Route]:
    return routes(*([RankLayout((section,)) for section in side] for side in (sources, destinations)))


def apply(copies: Copies, source: np.ndarray, destination: np.ndarray, writes: np.ndarray) -> None:
    for start, target, nbytes in zip(copies.source, copies.destination, copies.nbytes, strict=True):
        assert nbytes > 0
        destination[target : target + nbytes] = source[start : start + nbytes]
        writes[target : target + nbytes] += 1


def pieces_of(whole: range, cuts: set[int]) -> list[range]:
    borders = [whole.start, *sorted(cut for cut in cuts if whole.start < cut < whole.stop), whole.stop]
    return [range(start, stop) for start, stop in pairwise(borders)]


@settings(max_examples=examples(150))
@given(pairs(), st.data())
def test_every_byte_of_every_destination_block_is_written_once_and_with_what_it_stands_for(pair, data):
    source, destination, tokens = pair
    memories, targets = source.memory(fill=True), destination.memory(fill=False)
    writes = [np.zeros(len(memory), dtype=np.int64) for memory in targets]
    layer_cuts = data.draw(st.sets(st.integers(1, 4), max_size=2))
    unit_cuts = data.draw(st.sets(st.integers(1, 10), max_size=2))
    for route in routes_of(source.ranks, destination.ranks):
        if not (part := route.parts[0]):
            continue
        pairing = Pairing(source.ranks[route.source], destination.ranks[route.destination], part)
        parts = pieces_of(range(tokens), {cut * pairing.unit for cut in unit_cuts})
        for layers in pieces_of(pairing.layers, layer_cuts):
            for part in parts:
                copies = pairing.copies(layers, part.start, part.stop, source.table, destination.table)
                side = route.destination
                apply(copies, memories[route.source], targets[side], writes[side])
        stop = -(-tokens // pairing.unit) * pairing.unit
    for rank, target, written in zip(destination.ranks, targets, writes, strict=True):
        names, places = destination.bytes_of(rank, stop)
        assert (written[places] == 1).all()
        assert written.sum() == len(places)
        assert (target[places] == names).all()


@settings(max_examples=60)
@given(pairs(), st.data())
def test_both_sides_take_a_pages_checksum_over_the_same_bytes_which_are_those_that_were_copied(pair, data):
    source, destination, tokens = pair
    memories, targets = source.memory(fill=True), destination.memory(fill=False)
    for route in routes_of(source.ranks, destination.ranks):
        if not (part := route.parts[0]):
            continue
        pairing = Pairing(source.ranks[route.source], destination.ranks[route.destination], part)
        page_tokens = pairing.unit * data.draw(st.integers(1, 4))
        first = pairing.unit * data.draw(st.integers(0, (tokens - 1) // pairing.unit))
        part = (pairing.layers, first, tokens)
        copies = pairing.copies(*part, source.table, destination.table)
        target = targets[route.destination]
        apply(copies, memories[route.source], target, np.zeros_like(target))
        sent = pairing.source_pages(*part, source.table, page_tokens)
        landed = pairing.destination_pages(*part, destination.table, page_tokens)
        pages = [read_pages(runs, memory) for runs, memory in ((sent, memories[route.source]), (landed, target))]
        assert len(pages[0]) == len(pages[1]) == (-(-tokens // page_tokens) - first // page_tokens if part[0] else 0)
        for number, (one, other) in enumerate(zip(*pages, strict=True), first // page_tokens):
            assert len(one) and (one == other).all()
            assert set(tokens_of(one, source.model) // page_tokens) == {number}
        assert sum(map(len, pages[0])) == copies.nbytes.sum()


def tokens_of(names: np.ndarray, model: Model) -> np.ndarray:
    return names // model.itemsize // model.heads // (model.k_dim + model.v_dim) % TOKENS


def read_pages(runs, memory: np.ndarray) -> list[np.ndarray]:
    read = [memory[start : start + size] for start, size in zip(runs.addresses, runs.nbytes, strict=True)]
    bounds = runs.bounds.tolist()
    return [np.concatenate(read[i:j]) for i, j in pairwise(bounds)]


@settings(max_examples=60)
@given(pairs(), st.data())
def test_the_ranges_of_blocks_are_their_bytes_and_no_others(pair, data):
    _, instance, _ = pair
    rank = data.draw(st.sampled_from(instance.ranks))
    chosen = data.draw(st.lists(st.sampled_from(instance.table), unique=True))
    starts, sizes = rank.ranges(chosen)
    inside = {int(place) for start, size in zip(starts, sizes, strict=True) for place in range(start, start + size)}
    _, places = replace(instance, table=chosen).bytes_of(rank)
    assert inside == set(places.tolist())
    assert len(starts) < 2 or (starts[1:] > starts[:-1] + sizes[:-1]).all()


def test_a_block_named_twice_is_granted_once():
    for twice, once in zip(SMALL.ranges([2, 0, 2]), SMALL.ranges([0, 2]), strict=True):
        assert twice.tolist() == once.tolist()


@settings(max_examples=examples(100))
@given(pairs())
def test_every_source_rank_has_a_route_and_two_ranks_have_one_at_most(pair):
    source, destination, _ = pair
    found = routes_of(source.ranks, destination.ranks)
    assert {route.source for route in found} == set(range(len(source.ranks)))
    assert len({(route.source, route.destination) for route in found}) == len(found)
    idle = [route for route in found if route.parts == (None,)]
    assert all(sum(other.source == route.source for other in found) == 1 for route in idle)


def make_instance(model: Model, tp: int, block_tokens: int = 4, order: str = "LBHN", num_blocks: int = 4) -> Instance:
    return Instance(model, whole_ranks(model, tp, block_tokens, num_blocks, order), list(range(num_blocks)))


@pytest.mark.parametrize("heads, tp", [(1, 8), (2, 8), (4, 8), (1, 3)])
def test_replicas_share_the_work(heads, tp):
    model = Model(layers=2, heads=heads, k_dim=2, v_dim=0, itemsize=2)
    ranks = make_instance(model, tp).ranks
    found = routes_of(ranks, ranks)
    assert sorted(route.source for route in found) == sorted(route.destination for route in found) == list(range(tp))


def test_of_many_copies_of_a_head_one_is_sent():
    model = Model(layers=2, heads=2, k_dim=2, v_dim=2, itemsize=2)
    found = routes_of(make_instance(model, 8).ranks, make_instance(model, 1).ranks)
    working = [route for route in found if route.parts != (None,)]
    assert working == [Route(0, 0, (Shard(0, 2, 0, 1),)), Route(4, 0, (Shard(0, 2, 1, 2),))]
    assert [route.source for route in found if route.parts == (None,)] == [1, 2, 3, 5, 6, 7]


def copy_all(source: Instance, destination: Instance) -> Copies:
    pairing = Pairing(source.ranks[0], destination.ranks[0], routes_of(source.ranks, destination.ranks)[0].parts[0])
    tokens = len(source.table) * source.ranks[0].block_tokens
    return pairing.copies(pairing.layers, 0, tokens, source.table, destination.table)


@pytest.mark.parametrize(
    "order, source_table, destination_table, pieces",
    [
        ("LBHN", [0, 1, 2, 3], [0, 1, 2, 3], 1),  # all layers follow each other and every block is moved
        ("LBHN", [0, 1, 3, 2], [0, 1, 3, 2], 2 + 2 + 2),
        ("LBHN", [0, 2, 1, 3], [3, 1, 2, 0], 8),  # nothing follows anything
        ("BLHN", [0, 2, 1, 3], [3, 1, 2, 0], 4),  # the layers of a block follow each other
        ("LBNH", [0, 2, 1, 3], [3, 1, 2, 0], 8),
        ("BHLN", [0, 2, 1, 3], [3, 1, 2, 0], 4),
        ("HBLN", [0, 2, 1, 3], [3, 1, 2, 0], 12),
    ],
)
def test_pieces_that_follow_each_other_on_both_sides_are_one(order, source_table, destination_table, pieces):
    model = Model(layers=2, heads=3, k_dim=2, v_dim=2, itemsize=2)
    source, destination = (
        replace(make_instance(model, 1, order=order), table=table) for table in (source_table, destination_table)
    )
    assert len(copy_all(source, destination).nbytes) == pieces


@pytest.mark.parametrize(
    "source, destination, problem",
    [
        ((4, 0), (4, 2), r"pieces would have 2 bytes.*SegmentLayout.*SegmentLayout"),
        ((4, 4), (2, 2), r"blocks of 4 tokens.*blocks of 2 tokens"),
    ],
    ids=["another order of elements", "a group of tokens cut in two"],
)
def test_blocks_that_do_not_fit_are_refused_with_both_sides_values(source, destination, problem):
    """Each side has so many tokens in a block, and in a group within it."""
    model = Model(layers=1, heads=1, k_dim=32, v_dim=32, itemsize=2)
    sides = [make_rank(model, range(1), range(1), tokens, 2, group=group) for tokens, group in (source, destination)]
    with pytest.raises(LayoutError, match=problem):
        Pairing(*sides, ONE)


@pytest.mark.parametrize("field, value", [("layers", 3), ("heads", 4), ("k_dim", 8), ("v_dim", 0), ("itemsize", 1)])
def test_another_model_is_refused_with_both_sides_values(field, value):
    model = Model(layers=2, heads=2, k_dim=4, v_dim=4, itemsize=2)
    one, other = (make_instance(m, 1).ranks for m in (model, replace(model, **{field: value})))
    with pytest.raises(LayoutError, match="differ") as refused:
        routes_of(one, other)
    assert one[0].describe() in str(refused.value) and other[0].describe() in str(refused.value)


@pytest.mark.parametrize(
    "layers, heads, problem",
    [
        (range(2), [range(3)], "no source rank has layer 2, KV head 0"),
        (range(4), [range(2), range(1, 3)], "overlap in part"),
    ],
)
def test_sources_that_lack_a_layer_or_overlap_in_part_are_refused(layers, heads, problem):
    model = Model(layers=4, heads=3, k_dim=2, v_dim=2, itemsize=2)
    sources = [make_rank(model, layers, mine, 4, 4) for mine in heads]
    with pytest.raises(LayoutError, match=problem):
        routes_of(sources, make_instance(model, 1).ranks)


@pytest.mark.parametrize(
    "first, stop, source_table, destination_table, problem",
    [
        (2, 8, [0, 1], [0, 1], "moved together"),
        (-4, 8, [0, 1], [0, 1], "moved together"),
        (0, 9, [0, 1], [0, 1, 2], "2 blocks of 4 tokens end before token 8"),
        (0, 9, [0, 1, 2], [0, 1], "2 blocks of 4 tokens end before token 8"),
        (0, 8, [0, 4], [0, 1], r"block ids 0\.\.4"),
        (0, 8, [0, 1], [0, -2], r"block ids -2\.\.0"),
        (0, 8, [0, NO_BLOCK], [0, 1], "no block any more for token 4"),
    ],
)
def test_tokens_and_blocks_that_are_not_there_are_refused(first, stop, source_table, destination_table, problem):
    pairing = Pairing(SINGLE, SINGLE, ONE)
    with pytest.raises(LayoutError, match=problem):
        pairing.copies(pairing.layers, first, stop, source_table, destination_table)


@pytest.mark.parametrize("block_tokens", [(33, 32), (5000, 4999), (1 << 21, 3 << 20)])
def test_block_sizes_that_meet_too_rarely_are_refused(block_tokens):
    segments = [[SegmentLayout(at, ((tokens, 8),), ((2, 2),)) for at in (0, 4)] for tokens in block_tokens]
    sides = [
        replace(SINGLE, blocks=replace(SINGLE.blocks, block_tokens=tokens, k=k, v=v))
        for tokens, (k, v) in zip(block_tokens, segments, strict=True)
    ]
    with pytest.raises(LayoutError, match="too little in common"):
        Pairing(*sides, ONE)


@pytest.mark.parametrize("page_tokens", [0, 2, 6])
def test_pages_that_cut_what_is_moved_together_are_refused(page_tokens):
    pairing = Pairing(SINGLE, SINGLE, ONE)
    with pytest.raises(LayoutError, match=f"pages of {page_tokens} tokens"):
        pairing.source_pages(pairing.layers, 0, 8, [0, 1], page_tokens)


def test_layers_outside_of_the_part_are_refused():
    model = Model(layers=3, heads=1, k_dim=2, v_dim=2, itemsize=2)
    rank = make_instance(model, 1).ranks[0]
    pairing = Pairing(rank, rank, Shard(1, 2, 0, 1))
    with pytest.raises(LayoutError, match="the part has"):
        pairing.copies(range(2), 0, 4, [0], [0])


def changed(rank: Section, **fields: object) -> None:
    own = {name: value for name, value in fields.items() if name in Section.__dataclass_fields__}
    blocks = {name: value for name, value in fields.items() if name not in own}
    replace(rank, blocks=replace(rank.blocks, **blocks), **own)


@pytest.mark.parametrize(
    "fields",
    [
        {"shard": Shard(1, 3, 0, 2)},
        {"shard": Shard(0, 1, 0, 2)},
        {"shard": Shard(0, 2, 0, 3)},
        {"model_heads": 1 << 40, "shard": Shard(0, 2, 0, 1 << 40), "head_stride": 0},
        {"k_dim": 0},
        {"itemsize": 0},
        {"v_dim": 0},
        {"v": None},
        {"num_blocks": 0},
        {"block_tokens": 8},
        {"block_stride": -1},
        {"block_stride": 1 << 62},
        {"head_stride": 1 << 62},
        {"num_blocks": 1 << 62},
        {"layer_addresses": (1 << 60, 64)},
        {"layer_addresses": (-64, 64)},
        {"layer_addresses": ()},
        {"k": SegmentLayout(-1, ((4, 8),), ((2, 2),))},
        {"k": SegmentLayout(0, ((4, -8),), ((2, 2),))},
        {"k": SegmentLayout(0, ((4, 8),), ())},
        {"k": SegmentLayout(0, ((-2, 8), (-2, 2)), ((2, 2),))},
    ],
)
def test_an_impossible_layout_is_refused(fields):
    changed(SMALL)
    with pytest.raises(LayoutError):
        changed(SMALL, **fields)


def test_elements_that_share_bytes_cannot_be_granted():
    overlapping = replace(SMALL, blocks=replace(SMALL.blocks, head_stride=2))
    with pytest.raises(LayoutError, match="share bytes"):
        overlapping.ranges([0])


def test_the_model_splits_heads_as_engines_do():
    model = Model(layers=1, heads=4, k_dim=1, v_dim=1, itemsize=1)
    assert tp_sizes(4) == [1, 2, 4, 8]
    assert [heads_of(model, rank, 8).start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


# Sections

GROUPS = {"full": Model(layers=4, heads=4, k_dim=2, v_dim=2, itemsize=2), "sliding": Model(2, 4, 2, 2, 2)}


def rows(num_rows: int, nbytes: int = 8, name: str = "aux") -> Section:
    """A table of aux rows, every rank's own."""
    row = make_rank(Model(1, 1, nbytes, 0, 1), range(1), range(1), 1, num_rows)
    return replace(row, name=name, is_whole=True)


def make_ranks(tp: int, block_tokens: dict[str, int]) -> list[RankLayout]:
    """Ranks with two groups of layers and aux rows."""
    groups = {name: make_instance(GROUPS[name], tp, tokens).ranks for name, tokens in block_tokens.items()}
    sections = [[replace(ranks[rank], name=name) for name, ranks in groups.items()] for rank in range(tp)]
    return [RankLayout((*of_rank, rows(4))) for of_rank in sections]


@pytest.mark.parametrize("source_tp, destination_tp", [(1, 1), (1, 2), (2, 1), (4, 2), (8, 2)])
def test_each_section_of_each_destination_is_routed_once_whatever_their_order(source_tp, destination_tp):
    sources = make_ranks(source_tp, {"full": 4, "sliding": 2})
    destinations = make_ranks(destination_tp, {"sliding": 4, "full": 8})
    found = routes(sources, destinations)
    for number, wanted in enumerate(destinations):
        mine = [route for route in found if route.destination == number]
        for at, section in enumerate(wanted.sections):
            parts = [route.parts[at] for route in mine if route.parts[at]]
            assert sum(part.num_units for part in parts) == section.shard.num_units
            assert all(section.shard.covers(part) for part in parts)
        for route in mine:
            source = sources[route.source]
            for at, (own, _) in pair_sections(source, wanted, route.parts).items():
                assert source.sections[own].name == wanted.sections[at].name


def test_a_stage_without_a_section_sends_the_others():
    full, sliding, aux = make_ranks(1, {"full": 4, "sliding": 4})[0].sections
    sources = [RankLayout((full,)), RankLayout((sliding, aux))]
    found = routes(sources, [RankLayout((full, sliding, aux))])
    assert [route.parts for route in found] == [(full.shard, None, None), (None, sliding.shard, aux.shard)]
    with pytest.raises(LayoutError, match=r"the source has no section 'full'.*it has section 'sliding'.*section 'aux'"):
        pair_sections(sources[1], RankLayout((full,)), (full.shard,))


@pytest.mark.parametrize("lacking", ["source", "destination"])
def test_a_section_that_one_side_lacks_is_refused_with_both_sides_values(lacking):
    (whole,) = make_ranks(1, {"full": 4, "sliding": 2})
    fewer = RankLayout(whole.sections[:1])
    sides = ([fewer], [whole]) if lacking == "source" else ([whole], [fewer])
    with pytest.raises(LayoutError, match="only one side has section aux, sliding") as refused:
        routes(*sides)
    assert str(refused.value).count(whole.sections[0].describe()) == 2
    assert whole.sections[1].describe() in str(refused.value)


def test_a_section_of_another_shape_is_refused_with_both_sides_values():
    one, other = RankLayout((rows(4),)), RankLayout((rows(4, nbytes=16),))
    with pytest.raises(LayoutError, match=r"k_dim differ: .* 8 \+ 0 elements.* 16 \+ 0 elements"):
        routes([one], [other])
    with pytest.raises(LayoutError, match=r"is_whole differ: .* sent whole; and"):
        routes([one], [RankLayout((replace(rows(4), is_whole=False),))])


@pytest.mark.parametrize("sizes", [(4, 4), (8, 4), (4, 8), (4, 6), (6, 4)])
def test_windows_are_mapped_where_the_blocks_that_they_begin_in_are_filled_whole(sizes):
    source, destination = (replace(make_ranks(1, {"sliding": size})[0].sections[0], is_windowed=True) for size in sizes)
    if sizes[0] % sizes[1] == 0:
        assert Pairing(source, destination, destination.shard).unit == sizes[1]
        return
    with pytest.raises(LayoutError, match="window's first block") as refused:
        Pairing(source, destination, destination.shard)
    assert all(f"blocks of {size} tokens" in str(refused.value) for size in sizes)


def test_a_grant_covers_the_blocks_of_every_table_and_no_others():
    (rank,) = make_ranks(1, {"full": 4, "sliding": 2})
    tables = [Table(4, 16, [3, 1, 0, 2]), Table(0, 3, [2, 0]), Table(0, 1, [2])]
    starts, sizes = rank.ranges(tables)
    wanted = [rank.sections[0].ranges([1, 0, 2]), rank.sections[1].ranges([2, 0]), rank.sections[2].ranges([2])]
    assert starts.tolist() == [start for part, _ in wanted for start in part]
    assert sizes.tolist() == [size for _, part in wanted for size in part]
    with pytest.raises(LayoutError, match="2 block tables for 3 sections"):
        rank.ranges(tables[:2])


@pytest.mark.parametrize("sections", [(), (rows(1), rows(2)), tuple(rows(1, name=str(n)) for n in range(65))])
def test_a_rank_has_some_sections_of_different_names(sections):
    with pytest.raises(LayoutError, match=r"expected 1\.\.64, each name once"):
        RankLayout(sections)


@pytest.mark.parametrize("name", ["", "a" * 65, "a\n"])
def test_a_name_that_could_not_be_logged_is_refused(name):
    with pytest.raises(LayoutError, match=r"expected 1\.\.64 characters"):
        rows(1, name=name)
