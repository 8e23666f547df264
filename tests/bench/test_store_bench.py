"""`bench store` as a person runs it, at sizes that take seconds: what it prints where, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120
KEYS = ["figure", "value", "unit", "limit", "peer", "goal", "ok"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "bench", "store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("pools")
    return run("--quick", "--json", "--folder", str(folder)), folder


@pytest.fixture(scope="module")
def report(quick: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    done, _ = quick
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_stdout_is_one_json_object_and_progress_goes_to_stderr(
    quick: tuple[subprocess.CompletedProcess[str], Path], report: dict[str, Any]
) -> None:
    done, _ = quick
    assert list(report) == ["machine", "versions", "rows"]
    assert len(done.stdout.strip().splitlines()) == 1
    assert "memcpy" in done.stderr


def test_every_row_has_exactly_the_documented_keys(report: dict[str, Any]) -> None:
    assert report["rows"]
    assert all(list(row) == KEYS for row in report["rows"])


def test_every_figure_of_the_store_is_measured_and_a_quick_run_has_no_goals(report: dict[str, Any]) -> None:
    figures = [row["figure"] for row in report["rows"]]
    for beginning in (
        "get, 1 MiB pages, from another process's pool, every read verified",
        "get, 1 MiB pages, from another process's pool, verified once per process",
        "put, 1 MiB pages, with checksum",
        "get into 32 KiB scattered pieces",
        "one lookup",
        "prefix lookup of 256 keys",
        "one lookup, 20,000 keys in the index over 1,000",
        "prefix lookup, 20,000 keys in the index over 1,000",
        "index memory at 20,000 pages",
    ):
        row = next(row for row in report["rows"] if row["figure"].startswith(beginning))
        assert row["value"] > 0 and row["goal"] is None, row
    assert len(figures) == len(set(figures))


def test_limits_are_measured_in_the_row_s_unit(report: dict[str, Any]) -> None:
    limits = [row["limit"] for row in report["rows"] if row["unit"] in ("GB/s", "us", "ms")]
    assert limits and all(limit > 0 for limit in limits)


def test_without_a_peer_there_is_no_peer_figure_and_no_goal_against_it_is_called_reached(
    report: dict[str, Any],
) -> None:
    assert all(row["peer"] is None for row in report["rows"])
    assert not [row for row in report["rows"] if "peer" in (row["goal"] or "") and row["ok"] is True]


def test_the_machine_and_the_versions_are_named(report: dict[str, Any]) -> None:
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["python"] and report["versions"]["mooncake-connector"]


def test_nothing_of_the_run_stays(quick: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = quick
    assert not list(folder.iterdir())


def test_a_peer_without_its_wheel_is_said_loudly_and_the_rest_goes_on(tmp_path: Path) -> None:
    import venv

    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    done = run("--quick", "--json", "--folder", str(tmp_path), "--peer", "mooncake", "--peer-python", python)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "WARNING: no Mooncake rows" in said
    assert "pip install" in said
    assert all(row["peer"] is None for row in json.loads(done.stdout)["rows"])


def test_the_table_for_people_has_the_ratios(tmp_path: Path) -> None:
    done = run("--quick", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("figure", "limit", "of limit", "peer", "one lookup", "GB/s"):
        assert word in done.stdout
    assert "goal" not in done.stdout, "a quick run says nothing of them"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "redis"], "mooncake"),
        (["--peer-python", "/usr/bin/python3"], "--peer mooncake"),
        (["--model", "/"], "--vllm-python"),
        (["--vllm-python", sys.executable], "--model"),
        (["--vllm-python", sys.executable, "--model", "/"], "config.json"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run("--quick", "--folder", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert str(tmp_path / "absent") in done.stderr.replace("\n", "")
    assert not done.stdout


def test_a_vllm_python_without_vllm_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    import venv

    venv.create(tmp_path / "venv", with_pip=False)
    (tmp_path / "config.json").write_text("{}")
    python = str(tmp_path / "venv" / "bin" / "python")
    done = run("--quick", "--folder", str(tmp_path), "--vllm-python", python, "--model", str(tmp_path))
    assert done.returncode == 1
    assert "needs vLLM and mooncake-connector" in " ".join(done.stderr.split())
