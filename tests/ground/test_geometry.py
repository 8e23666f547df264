"""The rectangle of layers and heads, against sets of (layer, head)."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_connector.kv.geometry import Shard


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, 5))
    return start, draw(st.integers(start + 1, 6))


shards = st.builds(lambda layers, heads: Shard(*layers, *heads), ranges(), ranges())


def units(shard: Shard | None) -> set[tuple[int, int]]:
    return set() if shard is None else set(product(shard.layers, shard.heads))


@given(shards, shards)
def test_two_shards_have_in_common_what_both_have(one, other):
    assert units(one.common(other)) == units(one) & units(other)
    assert one.covers(other) == (units(other) <= units(one))
    assert one.num_units == len(units(one))


@given(shards, shards)
def test_what_is_common_is_where_it_was_when_seen_from_either(one, other):
    common = one.common(other)
    for shard in (one, other) if common else ():
        seen = units(common.seen_from(shard))
        assert {(layer + shard.layer_start, head + shard.head_start) for layer, head in seen} == units(common)


@given(shards, st.lists(shards, max_size=4))
def test_cells_are_the_whole_each_once_and_no_border_crosses_one(whole, others):
    cells = whole.cut(others)
    assert sorted(unit for cell in cells for unit in units(cell)) == sorted(units(whole))
    for cell, other in product(cells, others):
        assert other.covers(cell) or other.common(cell) is None


@pytest.mark.parametrize("bounds", [(0, 0, 0, 1), (1, 0, 0, 1), (-1, 1, 0, 1), (0, 1, 2, 2), (0, 1, -1, 1)])
def test_an_empty_or_negative_shard_is_refused(bounds):
    with pytest.raises(ValueError, match="is empty or negative"):
        Shard(*bounds)
