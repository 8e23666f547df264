"""Rows of `bench hicache`: each goal is held against the figures that it speaks of; and how the command refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_connector.cli import main
from mooncake_connector.cli.bench import hicache_bench, mooncake_peer
from mooncake_connector.cli.bench.hicache_rows import FILE, MOONCAKE, OURS, Figures, rows
from mooncake_connector.cli.bench.hicache_scale import CANONICAL, LOOKUP, MEMCPY, Geometry, HicacheScale
from mooncake_connector.cli.bench.report import Report, Row

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
    row = find(rows(ours, {mooncake_peer.POOL_ON: moved(MOONCAKE, 100)}, SCALE), title(operation, layout))
    assert row.value == pytest.approx(share * GB) and row.limit == pytest.approx(GB)
    assert row.ok is ok


def test_zero_copy_layouts_are_held_to_four_times_the_better_setting_between_two_processes() -> None:
    ours = {**moved(OURS, 1, SCALE.layouts), **moved(MEMCPY, 1, SCALE.layouts)}
    mooncake = {
        mooncake_peer.POOL_OFF: moved(MOONCAKE, 5),
        mooncake_peer.POOL_ON: moved(MOONCAKE, 3),
        mooncake_peer.OWN: moved(MOONCAKE, 0.5),
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
        mooncake_peer.POOL_OFF: looked_up(MOONCAKE, 0.003),
        mooncake_peer.POOL_ON: looked_up(MOONCAKE, 0.002),
    }
    for seconds, ok in ((0.0004, True), (0.0006, False)):
        row = find(rows(looked_up(OURS, seconds), mooncake, SCALE), "batch_exists of 512 keys")
        assert row.value == pytest.approx(seconds * 1e3) and row.peer == pytest.approx(2)
        assert row.ok is ok


def test_a_goal_against_a_peer_that_was_not_measured_is_neither_reached_nor_missed() -> None:
    ours = {**moved(OURS, 1, SCALE.layouts), **moved(MEMCPY, 1, SCALE.layouts)}
    row = find(rows(ours, {mooncake_peer.POOL_ON: {}}, SCALE), title("batch_get", CANONICAL))
    assert row.peer is None and row.ok is None


def test_every_setting_of_a_peer_is_reported_without_a_goal() -> None:
    mooncake = {mooncake_peer.OWN: {**moved(MOONCAKE, 2), **moved(MEMCPY, 1), **looked_up(MOONCAKE, 0.001)}}
    found = [row for row in rows({}, mooncake, SCALE) if row.figure.startswith("the Mooncake backend, own segment")]
    assert [row.value for row in found] == [pytest.approx(GB / 2), pytest.approx(GB / 2), pytest.approx(1)]
    assert all(row.goal is None and row.ok is None for row in found)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "bench", "hicache", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_report_is_one_json_object_or_a_table_with_the_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def measured(folder: Path, scale: HicacheScale, **options: object) -> Report:
        asked.update(options)
        return Report({}, {}, rows({**moved(OURS, 2), **moved(MEMCPY, 1)}, {}, SCALE))

    monkeypatch.setattr(hicache_bench, "run", measured)
    command = ["bench", "hicache", "--peer", "file", "--peer", "mooncake", "--sglang-python", "/a/python"]
    as_json = CliRunner().invoke(main.app, [*command, "--json"])
    assert json.loads(as_json.stdout)["rows"] and len(as_json.stdout.splitlines()) == 1
    assert asked["peers"] == {"file", "mooncake"} and asked["sglang"] == Path("/a/python")
    table = CliRunner().invoke(main.app, command).stdout
    assert "batch_get, model" in table and "0.5x" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--peer", "redis"], "mooncake"), (["--peer", "file", "--peer-python", "/usr/bin/python3"], "--peer mooncake")],
)
def test_wrong_options_are_refused_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout


def test_a_python_without_sglang_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    done = run("--quick", "--folder", str(tmp_path), "--sglang-python", str(tmp_path / "venv" / "bin" / "python"))
    assert done.returncode == 1
    assert "needs SGLang and mooncake-connector" in " ".join(done.stderr.split())
    assert not done.stdout
