"""`bench store` as a person runs it, at sizes that take seconds: what it prints where, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DEADLINE_S = 120
KEYS = ["figure", "value", "unit", "limit"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_connector.cli.main", "bench", "store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run, after which nothing of it stays: one JSON object on stdout, how far it is on stderr."""
    folder = tmp_path_factory.mktemp("pools")
    done = run("--quick", "--json", "--folder", str(folder))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) == 1 and "memcpy" in done.stderr
    assert not list(folder.iterdir())
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_row_has_exactly_the_documented_keys(report: dict[str, Any]) -> None:
    assert list(report) == ["machine", "versions", "rows"] and report["rows"]
    assert all(list(row) == KEYS for row in report["rows"])


def test_every_figure_of_the_store_is_measured_beside_its_limit(report: dict[str, Any]) -> None:
    figures = [row["figure"] for row in report["rows"]]
    for beginning in (
        "get, 1 MiB pages, from another process's pool, every read verified",
        "put, 1 MiB pages, with checksum",
        "get into 32 KiB scattered pieces",
        "one lookup",
        "prefix lookup of 256 keys",
    ):
        row = next(row for row in report["rows"] if row["figure"].startswith(beginning))
        assert row["value"] > 0 and row["limit"] > 0 and row["unit"] in ("GB/s", "us", "ms"), row
    assert len(figures) == len(set(figures))


def test_the_machine_and_the_versions_are_named(report: dict[str, Any]) -> None:
    assert report["machine"]["cores"] >= 1
    assert report["versions"]["python"] and report["versions"]["mooncake-connector"]


def test_the_table_for_people_has_the_ratios(tmp_path: Path) -> None:
    done = run("--quick", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("figure", "limit", "of limit", "one lookup", "GB/s", "sizes are tiny"):
        assert word in done.stdout


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = run("--quick", "--folder", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert str(tmp_path / "absent") in done.stderr.replace("\n", "")
    assert not done.stdout
