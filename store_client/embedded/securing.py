"""Securing the arena's memory, and some of it ahead of its use: who needs more of it holds the pool's write lock, and
the file system takes some ten milliseconds for 64 MiB. What is secured ahead is mapped as well, which takes as long.

What lies ahead is the file's and nobody's yet: the ledger does not know it. So a process may be killed at any time, and
several may secure the same; the next one to open the pool alone gives it back to the file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from mooncake_connector.sizes import human_nbytes
from store_client.embedded.faults import start_thread
from store_client.embedded.locks import secure_bytes
from store_client.embedded.memory_limit import left_for

AHEAD_NBYTES = 256 << 20
_SHARE = 16
"""Of the pool's capacity, one part in so many is secured ahead at most;"""
_LEFT = 4
"""and no more than one part in so many of what the file system has left."""
_STEP_NBYTES = 16 << 20
"""Secured at once: nobody waits for longer than that takes."""

Populate: TypeAlias = Callable[[int, int], None]

fallocate = ctypes.CDLL(None, use_errno=True).fallocate
"""The system's own. Where a file system has none, `os.posix_fallocate` writes a zero to each empty block, which spoils
a page that another process is just writing there."""
fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Securing:
    """Of one arena file, from wherever it is used.

    Args:
        fd: the file, open until after `close`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        """Held while something is secured."""
        self._start = self._stop = 0
        """What this process has secured lately, in bytes. Nobody gives it back while this process uses the file."""
        self._target = 0
        self._awaited = self._running = False

    def secure(self, start: int, stop: int, limit: int, populate: Populate) -> None:
        """Make the file hold these bytes; some of those behind them, up to `limit`, follow in the background, where
        `populate` maps them, from one byte to another. One call at a time. Raises OSError (ENOSPC) if the file system
        cannot, or a memory limit does not allow it."""
        self._awaited = True
        with self._lock:
            self._awaited = False
            if not self._start <= start <= self._stop:
                self._start = self._stop = start
            if stop > self._stop:
                self._check_limit(stop - self._stop)
                secure_bytes(self._fd, self._stop, stop - self._stop)
                self._stop = stop
            self._target = min(stop + self._distance(limit), limit)
            begins = not self._running and self._target > self._stop
            self._running = self._running or begins
        if begins and not start_thread("secure", self._run, populate):
            self._running = False

    def _distance(self, limit: int) -> int:
        info = os.fstatvfs(self._fd)
        room, left = info.f_bavail * info.f_frsize, left_for(self._fd)
        return min(AHEAD_NBYTES, limit // _SHARE, (room if left is None else min(room, left)) // _LEFT)

    def _check_limit(self, nbytes: int) -> None:
        left = left_for(self._fd)
        if left is not None and nbytes > left:
            raise OSError(
                errno.ENOSPC,
                f"the memory limit of this process's control group leaves too little for {human_nbytes(nbytes)}",
            )

    def _run(self, populate: Populate) -> None:
        while secured := self._step():
            populate(*secured)

    def _step(self) -> tuple[int, int] | None:
        """Secure a little more, from and to which byte; None once that was enough, or where somebody waits who will
        secure what he needs first."""
        with self._lock:
            size = min(_STEP_NBYTES, self._target - self._stop)
            # Where that fails, who needs the memory says so.
            if size > 0 and not self._awaited and self._fd >= 0 and fallocate(self._fd, 0, self._stop, size) == 0:
                self._stop += size
                return self._stop - size, self._stop
            self._running = False
            return None

    def close(self) -> None:
        """Before the file is closed; waits for what is just being secured."""
        with self._lock:
            self._fd = -1

    def abandon_in_child(self) -> None:
        """After a fork: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
