"""`bench transfer` as a person runs it, at sizes that take seconds, and its rows from figures that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers import children, links, steps, transfer, transports
from bench.peers.links import SCHEDULES, LinkFigures, LinkScale
from bench.peers.network import network
from bench.peers.steps import Beside
from bench.peers.transfer import MOONCAKE_OFF, MOONCAKE_ON, NIXL, NIXL_TCP
from bench.peers.transports import Figures
from mooncake_connector.cli.bench.store import MEMCPY
from mooncake_connector.cli.bench.transfer import RAW_TCP, READV
from mooncake_connector.cli.bench.transfer_far import TLS
from mooncake_connector.cli.bench.transfer_libraries import LIBRARIES
from mooncake_connector.cli.bench.transfer_scale import Scale

pytestmark = pytest.mark.slow

SCALE, LINKS = Scale(), LinkScale()
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
HAS_NETWORK = os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("tc"))
GB = SCALE.data_nbytes / 1e9


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=240, **options)


def test_a_user_gets_one_json_object_with_a_row_for_each_transport() -> None:
    done = run("mooncake_connector.cli.main", "bench", "transfer", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    figures = [row["figure"] for row in rows]
    assert len(done.stdout.strip().splitlines()) == 1
    assert figures[:3] == [f"{name}: 64 x 32 KiB, scattered to scattered" for name in ("cma", "shm", "tcp")]
    assert sum("16 KiB, p50" in figure for figure in figures) == 3
    assert all(row["value"] > 0 and row["limit"] > 0 for row in rows)
    for name in LIBRARIES:
        expected = 0 if f"{name} is left out" in done.stderr else 2
        assert sum(figure.startswith(f"{name}:") for figure in figures) == expected
    assert "bare TCP" in done.stderr


def test_a_comparison_has_a_busy_thread_links_and_planning_too(tmp_path: Path) -> None:
    command = ["bench.peers", "transfer", "--quick", "--json", str(tmp_path / "found")]
    done = run(*command, env={**os.environ, **children.path()})
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found").read_text())["rows"]
    figures = [row["figure"] for row in rows]
    assert figures[:3] == [f"{name}: 64 x 32 KiB, scattered to scattered" for name in ("cma", "shm", "tcp")]
    assert sum("Python thread" in figure for figure in figures) == 3 and any("planning" in each for each in figures)
    assert all(row["value"] > 0 for row in rows) and not any(row["goal"] for row in rows)
    over_links = [figure for figure in figures if "two links" in figure or "last byte" in figure]
    assert len(over_links) == (3 + len(SCHEDULES) if HAS_NETWORK else 0)
    assert ("WARNING: the rows over a network are left out" in done.stderr) == (not HAS_NETWORK)


def test_one_table_has_every_transport_that_works_here_and_each_library_alone(tmp_path: Path) -> None:
    command = ["bench.peers", "transports", "--quick", "--json", str(tmp_path / "found")]
    done = run(*command, env={**os.environ, **children.path()})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found").read_text())["rows"]
    names = list(dict.fromkeys(row["figure"].partition(":")[0] for row in found))
    assert names[:3] == ["cma", "shm", "tcp"] and len(found) == 8 * len(names)
    for name in LIBRARIES:
        assert (name in names) == (f"{name} is left out" not in done.stderr)
        assert sum(row["peer"] is not None for row in found if row["figure"].startswith(name)) == 5 * (name in names)
    assert all(row["value"] > 0 for row in found) and not any(row["goal"] for row in found)


def test_a_library_alone_is_what_the_transport_on_it_is_held_against() -> None:
    one, alone = (Figures((0.001, 0.002), seconds, seconds, cpu_s=seconds) for seconds in (1.0, 0.8))
    beside = transports.Beside(1.0, sending_s=1.5, receiving_s=3.0)
    found = transports.rows("nixl", {"nixl": one, "nixl alone": alone}, beside, SCALE)
    assert [row.ok for row in found if row.goal] == [False, False], "0.8 of the library's rate"
    found = transports.rows("tcp", {"tcp": one}, beside, SCALE)
    assert [row.ok for row in found if row.goal] == [True, False], "2/3 and 1/3 of the undisturbed rate"


@pytest.mark.parametrize("engine", transfer.INSTALL)
def test_a_peer_that_is_not_installed_says_what_to_install(engine: str) -> None:
    install = transfer.INSTALL[engine]
    order = {"engine": engine, "install": install, "role": "hold", "pieces": 1, "piece_nbytes": 8}
    command = children.script(sys.executable, "transfer_client", order)
    command.insert(1, "-S")  # without site-packages
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env={})
    assert refused.returncode == 1
    assert f"-m pip install {install}" in refused.stderr
    pins = [word for word in install.split() if "==" in word]
    assert set(pins) <= set((REQUIREMENTS / f"{engine}.txt").read_text().splitlines())


def test_each_transport_is_held_against_its_own_limit_and_peer() -> None:
    seconds = {"cma": GB / 4, "shm": GB / 3, "tcp": GB / 2, READV: GB / 4.2, MEMCPY: GB / 9, RAW_TCP: GB / 2.1}
    peers = {NIXL: GB / 2, NIXL_TCP: GB / 1.1, MOONCAKE_OFF: GB / 0.01, MOONCAKE_ON: GB / 1.5}
    rows = transfer.moving_rows(seconds, {name: {"scattered": each} for name, each in peers.items()}, SCALE)
    held = [
        (row.figure[:3], round(row.limit, 1) if row.limit else None, row.peer and round(row.peer, 1)) for row in rows
    ]
    assert held == [("cma", 4.2, 2.0), ("shm", 9.0, None), ("tcp", 2.1, 1.5), ("tcp", None, 1.1)]
    assert [row.ok for row in rows] == [True, True, True, False]


def test_tls_is_held_against_the_same_without() -> None:
    *_, tls = transfer.moving_rows({"tcp": GB / 2, RAW_TCP: GB / 2.1, TLS: GB / 0.5}, {}, SCALE)
    assert (tls.figure, round(tls.value, 1), round(tls.limit, 1)) == ("tcp with TLS (limit: tcp without)", 0.5, 2.0)


def test_a_small_transfer_is_held_against_a_bare_one_and_shown_beside_a_peer() -> None:
    ours = {"shm": (60e-6, 90e-6), "tcp": (80e-6, 90e-6), RAW_TCP: (50e-6, 70e-6)}
    peers = {NIXL: {"small": [40e-6, 50e-6]}, NIXL_TCP: {"error": "it died"}}
    rows = transfer.small_rows(ours, peers, SCALE)
    assert [(round(row.value), round(row.limit), row.peer and round(row.peer), row.ok) for row in rows] == [
        (60, 50, 40, True), (90, 70, 50, True), (80, 50, None, False), (90, 70, None, True),
    ]  # fmt: skip


def test_a_transfer_and_a_busy_thread_are_held_against_each_of_them_without_the_other() -> None:
    found = {"cma": Beside(1.05, 1.02, GB / 3), "shm": Beside(1.4, 1.1, GB / 0.5)}
    rows = steps.rows(found, {"cma": GB / 8, "shm": GB / 4}, SCALE)
    assert [(round(row.value, 2), round(row.limit, 2), row.unit, row.ok) for row in rows] == [
        (1.05, 1.02, "times", True), (3, 8, "GB/s", None), (1.4, 1.1, "times", False), (0.5, 4, "GB/s", None),
    ]  # fmt: skip


def test_a_peer_that_was_not_measured_leaves_its_goal_open() -> None:
    seconds = {"cma": GB / 4, "shm": GB / 3, "tcp": GB / 2, READV: GB / 4.2, MEMCPY: GB / 9, RAW_TCP: GB / 2.1}
    cma, shm, tcp = transfer.moving_rows(seconds, {}, SCALE)
    assert (cma.ok, shm.ok, tcp.ok) == (None, True, None)
    failed = {MOONCAKE_OFF: {"scattered": GB / 0.01}, MOONCAKE_ON: {"error": "it died"}}
    assert transfer.moving_rows(seconds, failed, SCALE)[2].ok is True


def test_rows_over_links_are_held_against_their_goals() -> None:
    good = LinkFigures(LINKS.nbytes * 8 / 1.85e9, 5.0, 1.0, dict.fromkeys(SCHEDULES, 0.019))
    assert [row.ok for row in links.rows(good, LINKS)] == [True, True, None, True, None, None, None]
    bad = LinkFigures(LINKS.nbytes * 8 / 1.75e9, 5.0, 0.0, dict.fromkeys(SCHEDULES, 0.021))
    assert [row.ok for row in links.rows(bad, LINKS)] == [False, False, None, False, None, None, None]
    assert links.rows(None, LINKS) == []


@pytest.mark.skipif(not HAS_NETWORK, reason="network namespaces take root, and `ip` and `tc`")
def test_nothing_of_the_network_stays_and_what_a_killed_run_left_is_removed() -> None:
    def namespaces() -> str:
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    over = subprocess.Popen(["true"])
    over.wait()
    left = f"mcbench{over.pid}a"
    subprocess.run(["ip", "netns", "add", left], check=True)
    try:
        with pytest.raises(ZeroDivisionError), network() as made:
            assert made.here in namespaces() and left not in namespaces()
            raise ZeroDivisionError
        assert made.here not in namespaces() and made.there not in namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", left], capture_output=True)
