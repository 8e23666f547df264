"""One thread of another process: which it is, and stopping it alone, as a disk or a device that hangs does."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from e2e.pages import wait_for
from e2e.process import ServerProcess

__all__ = ["stopped", "thread_that_wakes"]

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_ROUNDS = 2
"""A thread that woke by chance does not so again and again."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def thread_that_wakes(server: ServerProcess, wakes: Callable[[], object], sleeps: Callable[[], object]) -> int:
    """The one that does nothing at all through `sleeps`, and something in `wakes`, however often either is done."""
    found: set[int] = set()
    rounds = 0

    def is_one() -> bool:
        nonlocal found, rounds
        sleeps()  # what the last round woke falls asleep
        looks = [_woken(server)]
        for do in (sleeps, wakes):
            do()
            looks.append(_woken(server))
        before, between, after = looks
        woke = {tid for tid in after if before.get(tid) == between.get(tid) not in (None, after[tid])}
        rounds = rounds + 1 if found & woke else 1
        found = found & woke or woke
        return len(found) == 1 and rounds >= _ROUNDS

    wait_for(is_one, "one thread that wakes then and not otherwise")
    (tid,) = found
    return tid


def _woken(server: ServerProcess) -> dict[int, int]:
    """How often each thread of a server has gone to sleep so far."""
    counts = {}
    for process in server.processes():
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                (count,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", (task / "status").read_text(), re.MULTILINE)
                counts[int(task.name)] = int(count)
    return counts


@contextmanager
def stopped(tid: int) -> Iterator[None]:
    """The thread stands still meanwhile, and the others of its process go on: no signal does that. It should be one
    that sleeps, since it keeps the locks that it has."""
    try:
        _ptrace(_SEIZE, tid)
    except OSError as error:
        pytest.skip(f"NOT TESTED: a thread that stands still needs ptrace (as root, or with ptrace_scope 0): {error}")
    try:
        _ptrace(_INTERRUPT, tid)
        wait_for(lambda: os.waitpid(tid, os.WNOHANG | _WALL) != (0, 0), "a thread that stands still")
        yield
    finally:
        _ptrace(_DETACH, tid)


def _ptrace(request: int, tid: int) -> None:
    if _libc.ptrace(request, tid, None, None):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
