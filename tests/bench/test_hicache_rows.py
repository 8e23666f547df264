"""Rows of the comparison with SGLang: each goal is held against the figures that it speaks of."""

from __future__ import annotations

import pytest

from bench.peers import mooncake_store
from bench.peers.hicache_rows import (
    CANONICAL,
    FILE,
    LOOKUP,
    MEMCPY,
    MOONCAKE,
    OURS,
    Figures,
    Geometry,
    HicacheScale,
    rows,
)
from bench.peers.report import Row

MODEL = Geometry("model", num_layers=1, num_heads=1, head_dim=64)
SCALE = HicacheScale(geometries=(MODEL,), num_pages=1_000_000_000, lookup_keys=512)
GB = SCALE.page_nbytes(MODEL)
"""GB/s of one second."""


def moved(name: str, seconds: float, layouts: tuple[str, ...] = (CANONICAL,)) -> Figures:
    return {
        (operation, MODEL.name, layout, name): seconds for operation in ("batch_get", "batch_set") for layout in layouts
    }


def looked_up(name: str, seconds: float) -> Figures:
    return {("batch_exists", LOOKUP.name, CANONICAL, name): seconds}


def find(found: list[Row], figure: str) -> Row:
    (row,) = [row for row in found if row.figure == figure]
    return row


def title(operation: str, layout: str) -> str:
    return f"{operation}, model, 0.0 MiB pages, {layout}"


@pytest.mark.parametrize(
    ("layout", "operation", "share", "ok"),
    [
        ("page_first_direct", "batch_get", 0.46, True),
        ("page_first_direct", "batch_get", 0.44, False),
        ("layer_first", "batch_set", 0.41, True),
        ("layer_first", "batch_set", 0.39, False),
        ("page_first", "batch_get", 0.21, True),
        ("page_first", "batch_get", 0.19, False),
        ("page_head", "batch_set", 0.21, True),
        ("page_head", "batch_set", 0.19, False),
    ],
)
def test_a_layout_is_held_to_the_share_of_memcpy_that_it_can_reach(
    layout: str, operation: str, share: float, ok: bool
) -> None:
    ours = {**moved(OURS, 1 / share, SCALE.layouts), **moved(MEMCPY, 1, SCALE.layouts)}
    row = find(rows(ours, {mooncake_store.POOL_ON: moved(MOONCAKE, 100)}, SCALE), title(operation, layout))
    assert row.value == pytest.approx(share * GB) and row.limit == pytest.approx(GB)
    assert row.ok is ok


def test_zero_copy_layouts_are_held_to_four_times_the_better_setting_between_two_processes() -> None:
    ours = {**moved(OURS, 1, SCALE.layouts), **moved(MEMCPY, 1, SCALE.layouts)}
    mooncake = {
        mooncake_store.POOL_OFF: moved(MOONCAKE, 5),
        mooncake_store.POOL_ON: moved(MOONCAKE, 3),
        mooncake_store.OWN: moved(MOONCAKE, 0.5),
    }
    found = rows(ours, mooncake, SCALE)
    for layout, ok in (("page_first_direct", False), ("layer_first", False), ("page_first", True)):
        row = find(found, title("batch_get", layout))
        assert row.peer == pytest.approx(GB / 3)
        assert row.ok is ok


def test_zero_copy_layouts_are_held_to_twice_the_file_backend() -> None:
    for seconds, ok in ((2.1, True), (1.9, False)):
        ours = {**moved(OURS, 1, SCALE.layouts), **moved(FILE, seconds)}
        row = find(rows(ours, {}, SCALE), title("batch_set", "layer_first") + "; peer: the file backend")
        assert row.ok is ok


def test_a_lookup_is_held_to_half_a_millisecond_and_stands_beside_the_faster_setting() -> None:
    mooncake = {
        mooncake_store.POOL_OFF: looked_up(MOONCAKE, 0.003),
        mooncake_store.POOL_ON: looked_up(MOONCAKE, 0.002),
    }
    for seconds, ok in ((0.0004, True), (0.0006, False)):
        row = find(rows(looked_up(OURS, seconds), mooncake, SCALE), "batch_exists of 512 keys")
        assert row.value == pytest.approx(seconds * 1e3) and row.peer == pytest.approx(2)
        assert row.ok is ok


def test_a_goal_against_a_peer_that_was_not_measured_is_neither_reached_nor_missed() -> None:
    ours = {**moved(OURS, 1, SCALE.layouts), **moved(MEMCPY, 1, SCALE.layouts)}
    row = find(rows(ours, {mooncake_store.POOL_ON: {}}, SCALE), title("batch_get", CANONICAL))
    assert row.peer is None and row.ok is None


def test_every_setting_of_a_peer_is_reported_without_a_goal() -> None:
    mooncake = {mooncake_store.OWN: {**moved(MOONCAKE, 2), **moved(MEMCPY, 1), **looked_up(MOONCAKE, 0.001)}}
    found = [row for row in rows({}, mooncake, SCALE) if row.figure.startswith("the Mooncake backend, own segment")]
    assert [row.value for row in found] == [pytest.approx(GB / 2), pytest.approx(GB / 2), pytest.approx(1)]
    assert all(row.goal is None and row.ok is None for row in found)
