"""A disk after kill -9 and after a loss of power: what was made to last is there, and no page is ever wrong."""

import fcntl
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from long_form import LONG
from simulated.waiting import wait_for
from store.tiers.disk_worker import check, open_disk

WORKER = Path(__file__).with_name("disk_worker.py")
KILLS, CUTS = (400, 200) if LONG else (16, 5)
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2
"""What has not reached the device stays where it is: in memory, and lost."""


class Workers:
    """Worker processes, one after the other."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._server = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, folder: Path, seed: int) -> int:
        """A worker that has made to last what it keeps; its PID."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._report.unlink(missing_ok=True)
        self._server.stdin.write(json.dumps([str(folder), seed, str(self._report)]) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        wait_for(lambda: self.report() != "")
        assert self.report() == "kept", self.report()
        return pid

    def report(self) -> str:
        return self._report.read_text() if self._report.exists() else ""

    def wait(self) -> None:
        """Until the worker is over."""
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "over\n"

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path / "report")
    yield workers
    workers.close()


@pytest.mark.long
def test_kill_9_at_any_moment_leaves_no_wrong_page(tmp_path, workers):
    rng, found = random.Random(14), 0
    for seed in range(KILLS):
        pid = workers.start(tmp_path / "disk", seed)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(pid, signal.SIGKILL)
        workers.wait()
        assert workers.report() == "kept", workers.report()
        disk = open_disk(tmp_path / "disk")
        found += check(disk)
        disk.close()
    assert found > 0


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[None]:
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop", image, where], check=True)
    try:
        yield
    finally:
        if subprocess.run(["umount", where], check=False).returncode:
            subprocess.run(["umount", "-l", where], check=True)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A file with an ext4 in it that can be mounted."""
    image = tmp_path / "image"
    with open(image, "wb") as file:
        file.truncate(48 << 20)
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^resize_inode", image], check=True, capture_output=True)
        with mounted(image, tmp_path / "mounted"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"NOT TESTED: needs root, loop devices and mkfs.ext4 ({error})")
    return image


def cut_power(where: Path) -> None:
    fd = os.open(where, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    finally:
        os.close(fd)


@pytest.mark.long
def test_a_loss_of_power_leaves_no_wrong_page_and_a_failing_disk_says_so(tmp_path, image, workers):
    """The file system is shut down in the middle of everything, without a flush, and mounted again."""
    rng, found, where = random.Random(14), 0, tmp_path / "mounted"
    for seed in range(CUTS):
        with mounted(image, where):
            workers.start(where / "disk", seed)
            time.sleep(rng.uniform(0.0, 0.6))
            cut_power(where)
            workers.wait()
            assert workers.report().startswith("ended error: tier disk"), workers.report()
            assert "Input/output error" in workers.report()
        with mounted(image, where):
            disk = open_disk(where / "disk")
            found += check(disk)
            disk.close()
    assert found > 0
