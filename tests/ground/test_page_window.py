"""Parts of a canonical page, moved to and from some layers and heads of an engine, against the slow model of pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from ground.test_page import Case, axis_offset, cases, engine_address
from hypothesis import given
from hypothesis import strategies as st

from mooncake_connector.kv.page import PageFormat, Window, pack, unpack


@st.composite
def windows(draw: st.DrawFn) -> tuple[Case, PageFormat, Window, tuple[int, int, int]]:
    """An engine, a stored page of more or of fewer layers and heads, its window, and what to crop the engine to."""
    case = draw(cases())
    num_layers, num_heads = draw(st.integers(1, case.fmt.num_layers)), draw(st.integers(1, case.fmt.num_heads))
    window = Window(draw(st.integers(0, 2)), num_layers, draw(st.integers(0, 2)), num_heads)
    fmt = replace(
        case.fmt,
        num_layers=window.first_layer + num_layers + draw(st.integers(0, 2)),
        num_heads=window.first_head + num_heads + draw(st.integers(0, 2)),
    )
    first_layer = draw(st.integers(0, case.fmt.num_layers - num_layers))
    first_head = draw(st.integers(0, case.fmt.num_heads - num_heads))
    return case, fmt, window, (first_layer, num_layers, first_head)


def window_pairs(
    case: Case, fmt: PageFormat, window: Window, crop: tuple[int, int, int], skip: int
) -> list[tuple[int, int]]:
    """Every byte of a page that lies in the window, with its address in the engine."""
    found = []
    first_layer, _, first_head = crop
    offset = 0
    for segment, dim in ((case.layout.k, fmt.k_dim), (case.layout.v, fmt.v_dim)):
        for layer, token, head, element in np.ndindex(fmt.num_layers, fmt.page_tokens, fmt.num_heads, dim):
            block, place = divmod(case.first_token + token, case.layout.block_tokens)
            layer_in, head_in = layer - window.first_layer, head - window.first_head
            if 0 <= layer_in < window.num_layers and 0 <= head_in < window.num_heads and token >= skip:
                assert segment is not None
                base = engine_address(
                    case.layout, segment, layer_in + first_layer, case.table[block], head_in + first_head, place
                )
                for byte in range(fmt.itemsize):
                    found.append((offset + byte, base + axis_offset(segment.dim, element) + byte))
            offset += fmt.itemsize
    assert offset == fmt.nbytes
    return found


@given(windows())
def test_a_window_is_unpacked_into_some_layers_and_heads_and_nothing_else_changes(
    drawn: tuple[Case, PageFormat, Window, tuple[int, int, int]],
) -> None:
    case, fmt, window, crop = drawn
    case.table = list(dict.fromkeys(case.table))
    if case.first_token + fmt.page_tokens > len(case.table) * case.layout.block_tokens:
        return
    page = np.random.default_rng(1).integers(0, 256, fmt.nbytes, dtype=np.uint8)
    expected = case.memory.copy()
    for offset, address in window_pairs(case, fmt, window, crop, case.skip):
        expected[case.at(address)] = page[offset]
    unpack(fmt, case.layout.crop(*crop), case.table, case.first_token, page, case.skip, window)
    assert np.array_equal(case.memory, expected)


@given(windows())
def test_a_window_is_packed_from_some_layers_and_heads_and_the_rest_of_the_page_is_left_alone(
    drawn: tuple[Case, PageFormat, Window, tuple[int, int, int]],
) -> None:
    case, fmt, window, crop = drawn
    page = np.random.default_rng(1).integers(0, 256, fmt.nbytes, dtype=np.uint8)
    expected = page.copy()
    for offset, address in window_pairs(case, fmt, window, crop, 0):
        expected[offset] = case.memory[case.at(address)]
    pack(fmt, case.layout.crop(*crop), case.table, case.first_token, page, window)
    assert np.array_equal(page, expected)
