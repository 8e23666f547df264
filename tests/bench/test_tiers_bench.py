"""The figures of the tiers come out, whatever they are here."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiers.mooncake_cluster import needs_mooncake

from bench.peers import tiers, vllm_tiers
from bench.tiers import disk, engine, folder
from bench.tiers.measure import Rates, Scale, compare

pytestmark = pytest.mark.slow

TINY = Scale(nbytes=4 << 20, rounds=1, pages=(1 << 20,))


def rows_of(measured: list[Rates], title: str) -> None:
    assert [rates.what for rates in measured] == [f"{title}, {what}, pages of 1024 KiB" for what in ("write", "read")]
    for rates in measured:
        assert min(*rates.ours, *rates.other) > 0 and rates.ratio == rates.ours[0] / rates.other[0]
        assert rates.what in str(rates)


@pytest.mark.skipif(not shutil.which("fio"), reason="NOT TESTED: needs fio")
def test_a_disk_beside_fio(tmp_path):
    rows_of(disk.measure(tmp_path, TINY), "disk")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_beside_plain_files(tmp_path):
    rows_of(folder.measure(tmp_path, TINY), "folder")
    assert list(tmp_path.iterdir()) == []


def test_the_ratio_is_that_of_the_rounds():
    """A round in which everything was slow changes nothing."""
    rates = Rates("x", ours=(4.0, 1.0, 8.0), other=(5.0, 1.25, 4.0))
    assert rates.ratio == 0.8


def test_a_cluster_beside_a_bare_client(tmp_path):
    needs_mooncake()
    command = [sys.executable, "-m", "bench.tiers.mooncake", str(tmp_path), "tiny"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[1]}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "mooncake, write, pages of 1024 KiB", "mooncake, read, pages of 1024 KiB",
        "mooncake, read for 8 prompts at once, pages of 1024 KiB",
    ]  # fmt: skip


def test_what_tiers_cost_an_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("store_client.agent.client._KEPT_S", 0.0)
    monkeypatch.setattr(engine, "_FORGOTTEN_S", 0.0)
    found = engine.measure(tmp_path, quick=True)
    assert len(found.miss) == len(found.plain_miss) == 50
    rows = tiers.engine_rows(found)
    assert all(row.value is not None for row in rows) and rows[3].limit == engine.percentile(found.plain_miss, 99)


def test_what_tiers_add_is_the_difference_of_percentiles_with_its_spread() -> None:
    said: list[str] = []
    plain = [float(number) / 1000 for number in range(1, 101)]
    found = {"none": {"idle_s": plain}, "silent": {"idle_s": [one + 0.001 for one in plain]}}
    rows = {one.figure: one for one in vllm_tiers.ttft_rows(found, said.append)}
    (p99,) = [one for name, one in rows.items() if name.endswith("never answers, p99") and "idle" in name]
    assert p99.value == pytest.approx(1.0) and p99.ok and p99.limit == pytest.approx(99.01)
    assert "1.00 (" in next(line for line in said if "p50" in line)
    assert all("a cluster" not in name for name in rows), "what was not measured has no row"


def test_the_step_is_compared_round_by_round() -> None:
    """A round in which everything was slow changes nothing."""
    found = {
        "none": {"step_s": [1.0, 5.0, 1.0]},
        "silent": {"step_s": [1.1, 5.5, 1.1], "cpu_s": [1.02, 5.1, 1.02], "plain_cpu_s": [1.0, 5.0, 1.0]},
    }
    rows = {one.figure: one for one in vllm_tiers.step_rows(found, lambda line: None) if "change by" in one.figure}
    silent = {name: row for name, row in rows.items() if name.endswith("never answers")}
    assert [row.value for row in silent.values()] == [pytest.approx(2.0), pytest.approx(10.0)]
    assert [row.ok for row in silent.values()] == [False, None], "the goal is for CPU time"
    assert all(row.value is row.ok is None for name, row in rows.items() if name not in silent)


def test_the_pause_that_a_request_waits_for_is_told_by_itself() -> None:
    said: list[str] = []
    found: dict[str, Any] = {"none": {"pause_s": [0.001, 0.003]}, "silent": {"pause_s": [0.003, 0.003]}, "ready": True}
    vllm_tiers.step_rows(found, said.append)
    assert ["3.00" in line for line in said if "pause" in line] == [True]
    said.clear()
    vllm_tiers.step_rows({"none": {}}, said.append)
    assert not any("pause" in line for line in said), "it was not measured"


def test_who_is_measured_first_takes_turns(tmp_path) -> None:
    """What comes first has a disk that was left alone for longer."""
    order: list[str] = []

    def measured(name: str, rate: float, *_: object):
        order.append(name)
        yield "read", rate

    scale = Scale(nbytes=1, rounds=3, pages=(1 << 20,))
    (rates,) = compare("disk", scale, tmp_path, partial(measured, "ours", 2.0), partial(measured, "other", 4.0))
    assert order == ["other", "ours", "ours", "other", "other", "ours"]
    assert (rates.ours, rates.other) == ((2.0,) * 3, (4.0,) * 3)


def test_a_resampled_figure_lies_within_its_spread() -> None:
    found = vllm_tiers.Spread.of([1.0, 2.0, 3.0, 4.0], [1.0, 1.0], max)
    assert (found.value, found.high) == (3.0, 3.0) and 0.0 <= found.low < 3.0
