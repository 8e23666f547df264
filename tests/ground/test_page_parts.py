"""Pages of one shard, moved to the blocks of a rank that holds another, against the slow model of pages."""

from __future__ import annotations

import numpy as np
import pytest
from ground.test_page import Case, axis_offset, cases, engine_address
from hypothesis import given
from hypothesis import strategies as st

from mooncake_connector.errors import PageError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import PageFormat, fit, unpack


@st.composite
def shards(draw: st.DrawFn) -> tuple[Case, Shard, Shard]:
    """An engine, the shard that it holds, and another one that has something in common with it."""
    case = draw(cases())
    own = Shard(*draw(around(case.fmt.num_layers)), *draw(around(case.fmt.num_heads)))
    layer, head = draw(st.sampled_from(own.layers)), draw(st.sampled_from(own.heads))
    first = draw(st.integers(0, layer)), draw(st.integers(0, head))
    last = draw(st.integers(layer, own.layer_stop + 1)), draw(st.integers(head, own.head_stop + 1))
    return case, own, Shard(first[0], last[0] + 1, first[1], last[1] + 1)


@st.composite
def around(draw: st.DrawFn, count: int) -> tuple[int, int]:
    start = draw(st.integers(0, 2))
    return start, start + count


def pairs(case: Case, own: Shard, stored: Shard, fmt: PageFormat) -> list[tuple[int, int]]:
    """Every byte of a page of `stored` that the engine has a place for, with its address there."""
    found = []
    offset = 0
    for segment, dim in ((case.layout.k, fmt.k_dim), (case.layout.v, fmt.v_dim)):
        for layer, token, head, element in np.ndindex(stored.num_layers, fmt.page_tokens, stored.num_heads, dim):
            block, place = divmod(case.first_token + token, case.layout.block_tokens)
            layer_in, head_in = layer + stored.layer_start, head + stored.head_start
            if layer_in in own.layers and head_in in own.heads and token >= case.skip:
                assert segment is not None
                mine = layer_in - own.layer_start, head_in - own.head_start
                base = engine_address(case.layout, segment, mine[0], case.table[block], mine[1], place)
                for byte in range(fmt.itemsize):
                    found.append((offset + byte, base + axis_offset(segment.dim, element) + byte))
            offset += fmt.itemsize
    assert offset == fmt.nbytes
    return found


@given(shards())
def test_what_a_page_of_another_shard_has_in_common_is_unpacked_and_nothing_else_changes(
    drawn: tuple[Case, Shard, Shard],
) -> None:
    case, own, stored = drawn
    case.table = list(dict.fromkeys(case.table))
    if case.first_token + case.fmt.page_tokens > len(case.table) * case.layout.block_tokens:
        return
    fmt, part = fit(case.fmt, own, stored)
    page = np.random.default_rng(1).integers(0, 256, fmt.nbytes, dtype=np.uint8)
    expected = case.memory.copy()
    for offset, address in pairs(case, own, stored, fmt):
        expected[case.at(address)] = page[offset]
    unpack(fmt, case.layout, case.table, case.first_token, page, case.skip, part)
    assert np.array_equal(case.memory, expected)


def test_shards_without_anything_in_common_do_not_fit() -> None:
    with pytest.raises(PageError, match="nothing in common"):
        fit(PageFormat(2, 16, 4, 2, 2, 2), Shard(0, 2, 0, 4), Shard(2, 4, 0, 4))
