"""A folder on a real FUSE mount: bindfs, a file system in a process that shows another folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from simulated.waiting import wait_for


class Mount:
    """Where it is, and the process that answers for it."""

    def __init__(self, path: Path, server: subprocess.Popen[bytes]) -> None:
        self.path, self._server = path, server

    def hang(self) -> None:
        self._server.send_signal(signal.SIGSTOP)
        wait_for(lambda: all("(stopped)" in status.read_text() for status in self._threads()))

    def _threads(self) -> list[Path]:
        return list(Path(f"/proc/{self._server.pid}/task").glob("*/status"))

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def die(self) -> None:
        self._server.kill()
        self._server.wait()


@contextmanager
def fuse_mount(parent: Path) -> Iterator[Mount]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or not shutil.which("bindfs") or not shutil.which("fusermount3"):
        pytest.skip("NOT TESTED: needs /dev/fuse, bindfs and fuse3")
    behind, path = parent / "behind", parent / "mounted"
    behind.mkdir()
    path.mkdir()
    server = subprocess.Popen(["bindfs", "-f", "--no-allow-other", str(behind), str(path)], stderr=subprocess.PIPE)
    try:
        wait_for(lambda: os.path.ismount(path) or server.poll() is not None)
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"NOT TESTED: no FUSE mount can be made here ({server.stderr.read().decode().strip()})")
        yield Mount(path, server)
    finally:
        server.send_signal(signal.SIGCONT)
        subprocess.run(["fusermount3", "-u", "-z", "-q", str(path)], check=False)
        server.terminate()
        server.wait()
        assert server.stderr is not None
        server.stderr.close()
