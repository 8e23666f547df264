"""A process that holds a pool's write lock and is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD_AND_STOP = """
import fcntl, os, signal, sys
from pathlib import Path
(lock,) = Path(sys.argv[1]).rglob("table")
file = lock.open()
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextmanager
def stopped_holder(pool: Path) -> Iterator[subprocess.Popen[str]]:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD_AND_STOP, str(pool)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        os.waitpid(holder.pid, os.WUNTRACED)
        yield holder
    finally:
        holder.kill()
        holder.wait()
