"""The comparison of a snapshot with `cp`: all four ways are measured, on pages that come back."""

from __future__ import annotations

from bench.snapshot import measure


def test_every_way_has_a_figure_for_each_round(tmp_path, pool):
    pool.mkdir()
    (tmp_path / "disk").mkdir()
    figures = measure(tmp_path / "disk", pool, 2 << 20, 64 << 10, rounds=2)
    assert set(figures) == {"snapshot", "cp to the disk", "restore", "cp from the disk"}
    assert all(len(values) == 2 and min(values) > 0 for values in figures.values())
