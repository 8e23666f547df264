"""`bench transfer` as a person runs it, at sizes that take seconds, and its rows from figures that are made up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.peers import children, links, steps, transfer, transports
from bench.peers.links import SCHEDULES, LinkFigures, LinkScale
from bench.peers.network import network
from bench.peers.steps import Beside
from bench.peers.transfer import MOONCAKE_OFF, MOONCAKE_ON, NIXL, NIXL_TCP
from bench.peers.transports import Figures
from mooncake_connector.cli.bench import transfer_rdma
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.store import MEMCPY
from mooncake_connector.cli.bench.transfer import RAW_TCP, READV
from mooncake_connector.cli.bench.transfer_far import TLS
from mooncake_connector.cli.bench.transfer_libraries import LIBRARIES
from mooncake_connector.cli.bench.transfer_rdma import READ_BW, READ_LAT, Perftest
from mooncake_connector.cli.bench.transfer_scale import Scale
from transfer.transports.rdma.rails import Rail

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
        assert sum(row["limit"] is not None for row in found if row["figure"].startswith(name)) == 5 * (name in names)
    assert all(row["value"] > 0 for row in found) and not any(row["goal"] for row in found)


def test_a_library_alone_is_what_the_transport_on_it_is_held_against() -> None:
    one, alone = (Figures((0.001, 0.002), seconds, seconds, cpu_s=seconds) for seconds in (1.0, 0.8))
    beside = transports.Beside(1.0, sending=0.67, receiving=0.33, elsewhere=0.7)
    copying = Figures((0.001, 0.002), 0.9, 0.9, cpu_s=1.2)
    found = transports.rows("nixl", {"nixl": one, "nixl alone": alone, "nixl beside a copy": copying}, beside, SCALE)
    limits = [row.value / row.limit for row in found if row.limit]
    assert limits == pytest.approx([0.9, 0.9, 1.0 / 1.2, 0.67 / 0.7, 0.33 / 0.7])
    assert [row.ok for row in found if row.goal] == [False, False], "0.8 of the library's rate"
    for name in ("tcp", TLS):
        found = transports.rows(name, {name: one}, beside, SCALE)
        assert [row.ok for row in found if row.goal] == [True, False]


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


class TestPerftest:
    """Over a stand-in that says what perftest's programs of Debian 12 say."""

    SAID = """---------------------------------------------------------------------------------------
                    RDMA_Read BW Test
 Mtu             : 4096[B]
 local address: LID 0000 QPN 0x0011 PSN 0xf06e36 OUT 0x80 RKey 0x00024f VAddr 0x007f27499c4000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:77:08:01
---------------------------------------------------------------------------------------
"""
    BW = """ #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    20               2.12               1.81   \t\t   0.000002
"""
    LAT = """ #bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec] t_stdev[usec] 99%[usec] 99.9%[usec]
 16384   1000          90.10          300.50       100.25\t       101.00\t\t5.00\t\t150.75\t\t200.00
"""

    @pytest.fixture
    def perftest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Perftest:
        for program, said in ((READ_BW, self.BW), (READ_LAT, self.LAT)):
            (tmp_path / f"{program}.txt").write_text(self.SAID + said)
            text = f"""#!/bin/sh
case "$*" in
  *127.0.0.1) [ -e {tmp_path}/listens ] || {{ touch {tmp_path}/listens; echo "no connection" >&2; exit 1; }}
    echo "$*" > {tmp_path}/asked; cat {tmp_path}/{program}.txt ;;
  *) sleep 60 ;;
esac
"""
            (tmp_path / program).write_text(text)
            (tmp_path / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return Perftest(Rail("rxe0", 2, True, "RoCE v2", bytes(16), 5))

    def test_its_figures_are_taken_over_the_port_that_ours_uses(self, perftest: Perftest, tmp_path: Path) -> None:
        assert perftest.gigabytes_per_second(1 << 20, 20) == pytest.approx(1.81 * 1.048576e-3)
        asked = (tmp_path / "asked").read_text()
        assert "-d rxe0 -i 2 -x 5" in asked and "-s 1048576 -n 20" in asked
        assert perftest.latency_s(16384, 1000) == pytest.approx((100.25e-6, 150.75e-6))

    def test_one_that_fails_says_why(self, perftest: Perftest, tmp_path: Path) -> None:
        (tmp_path / READ_BW).write_text("#!/bin/sh\necho no such device >&2; exit 1\n")
        with pytest.raises(BenchError, match="ib_read_bw failed: no such device"):
            perftest.gigabytes_per_second(1 << 20, 20)


def test_ours_over_a_card_is_held_against_perftest_with_the_processor_time_it_took() -> None:
    scale = Scale(pieces=4, piece_nbytes=1 << 20, rounds=3)
    perftest: Any = SimpleNamespace(gigabytes_per_second=lambda *asked: 0.5, latency_s=lambda *asked: (90e-6, 100e-6))
    far: Any = SimpleNamespace(pid=os.getpid())
    moved, spent = transfer_rdma.moving_rows(lambda: time.sleep(0.01), far, perftest, scale)
    assert 0 < moved.value < scale.data_nbytes / 0.01 / 1e9 and moved.limit == 0.5
    assert (spent.unit, spent.limit) == ("s/GiB", None) and spent.value >= 0
    rows = transfer_rdma.small_rows(lambda: None, perftest, Scale(small_rounds=3))
    assert [round(row.limit) for row in rows] == [90, 100]
    assert [row.limit for row in transfer_rdma.small_rows(lambda: None, None, Scale(small_rounds=3))] == [None, None]


def test_a_transport_that_there_is_not_is_refused_and_only_those_named_are_measured() -> None:
    refused = run("mooncake_connector.cli.main", "bench", "transfer", "--transport", "rdmx")
    assert refused.returncode != 0 and "'rdmx' is unknown" in refused.stderr
    done = run("mooncake_connector.cli.main", "bench", "transfer", "--quick", "--json", "--transport", "cma")
    assert done.returncode == 0, done.stderr
    assert all(row["figure"].startswith("cma") for row in json.loads(done.stdout)["rows"])


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
