"""What a test does to the pool of a server that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from store.pools import data_folder

__all__ = ["damage", "lock_held"]

_HOLD_LOCK_AND_STOP = """
import fcntl, os, signal, sys
file = open(sys.argv[1], "r+b")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def damage(pool: Path) -> None:
    """Wrong bytes in every page."""
    with open(data_folder(pool) / "arena", "r+b") as arena:
        for granule in range(0, os.fstat(arena.fileno()).st_blocks * 512, 4096):
            arena.seek(granule + 7)
            byte = arena.read(1)
            arena.seek(granule + 7)
            arena.write(bytes([byte[0] ^ 1]))


@contextmanager
def lock_held(pool: Path) -> Iterator[None]:
    """By a process that is stopped."""
    command = [sys.executable, "-c", _HOLD_LOCK_AND_STOP, str(data_folder(pool) / "table")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.send_signal(signal.SIGKILL)
