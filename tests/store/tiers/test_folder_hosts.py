"""Ten hosts on one folder at once, as processes: they write the same pages, sweep, and are killed while they do."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from long_form import LONG
from simulated.waiting import wait_for
from store.tiers.folder_worker import CAPACITY, CHAINS, chain_of, space_of
from store.tiers.fuse import fuse_mount
from store.tiers.test_folder import all_files, make_older, sweep_now

from mooncake_connector.config.tiers import FolderTier
from store_client.tiers.folder import SharedFolder
from store_client.tiers.testing import MakeTier, Memory, TierConformance, read

WORKER = Path(__file__).with_name("folder_worker.py")
HOSTS = 10
KILLS = 600 if LONG else 20
ROUNDS = 4
"""That the hosts that are alive make between two kills, all together."""


class Hosts:
    def __init__(self, folder: Path, reports: Path) -> None:
        self._reports, self._next = reports, 0
        reports.mkdir()
        self._server = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(reports)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pids = [self._start() for _ in range(HOSTS)]

    def _start(self) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{self._next}\n")
        self._server.stdin.flush()
        self._next += 1
        return int(self._server.stdout.readline())

    def kill(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGKILL)
        self.pids[number] = self._start()

    def counts(self) -> list[int]:
        """Rounds, pages read and pages that sweeps took out, of all hosts that ever were."""
        wrong = self._reports / "wrong"
        assert not wrong.exists(), wrong.read_text()
        found = [[int(word) for word in report.read_text().split()] for report in self._reports.iterdir()]
        return [sum(column) for column in zip(*[one for one in found if len(one) == 3], strict=True)] or [0, 0, 0]

    def stop(self) -> None:
        """Kill them all and wait for their last calls: one that the kernel has begun is carried out nonetheless, and a
        page may vanish or appear by it."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.communicate()


@contextmanager
def on_nfs() -> Iterator[Path]:
    """A folder on a mount of the kernel's NFS client, which kernels of small virtual machines often lack."""
    mount = os.environ.get("MOONCAKE_TEST_NFS")
    if not mount:
        pytest.skip("NOT TESTED: set MOONCAKE_TEST_NFS to an empty folder on an NFS mount")
    with tempfile.TemporaryDirectory(dir=mount) as folder:
        yield Path(folder)


@pytest.fixture(params=["disk", "fuse", "nfs"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with ExitStack() as stack:
        if request.param == "fuse":
            yield stack.enter_context(fuse_mount(tmp_path)).path
        elif request.param == "nfs":
            yield stack.enter_context(on_nfs())
        else:
            (tmp_path / "mounted").mkdir()
            yield tmp_path / "mounted"


@pytest.mark.long
def test_ten_hosts_share_a_folder_and_are_killed_at_any_moment(folder, tmp_path):
    rng, hosts = random.Random(14), Hosts(folder, tmp_path / "reports")
    try:
        for _ in range(KILLS):
            before = hosts.counts()[0]
            wait_for(lambda before=before: hosts.counts()[0] >= before + ROUNDS)
            time.sleep(rng.uniform(0, 0.02))
            hosts.kill(rng.randrange(HOSTS))
        wait_for(lambda: all(hosts.counts()))
    finally:
        hosts.stop()
    assert not (tmp_path / "reports" / "wrong").exists()
    for left in all_files(folder):
        if left.suffix == ".new":
            make_older(left, 86400)
    host, found = sweep_now(folder, capacity=CAPACITY), 0
    assert (host.stats().used_nbytes or 0) <= CAPACITY
    assert not [left for left in all_files(folder) if left.suffix == ".new"]
    for number in range(CHAINS):
        keys, nbytes = chain_of(number)
        found += sum(read(host, Memory(1 << 20), space_of(nbytes), keys, nbytes))
    assert found == host.stats().pages
    host.close()


class TestSharedFolderOnFuse(TierConformance):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> Iterator[MakeTier]:
        with fuse_mount(tmp_path) as mount:
            yield lambda: SharedFolder(FolderTier(path=mount.path))
