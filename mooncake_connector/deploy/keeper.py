"""Runs one command and leaves nothing of it behind: `python -I keeper.py STOP_S COMMAND...`, standard library only.

Whatever the command starts, in whatever session, ends with it: a keeper takes over orphans of its command, and kills
what is left of them before it ends itself. The command is stopped when the keeper is told to (SIGTERM; SIGINT: at
once), and when whoever started the keeper is gone, however: its standard input ends then.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Set

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_SWEEP_S = 10.0
"""For what was killed to be gone."""


def become_reaper() -> None:
    """Orphans below this process become its children from now on."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(parents: Set[int]) -> set[int]:
    """Processes below any of `parents`, at any depth, those that ended and were not waited for included."""
    parent_of = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent_of[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it has ended
    found: set[int] = set()
    while more := {pid for pid, parent in parent_of.items() if parent in parents | found} - found:
        found |= more
    return found


def sweep(spare: Set[int] = frozenset()) -> bool:
    """Kill everything below this process but `spare` and what is below that; whether it is gone in time."""
    deadline_s = time.monotonic() + _SWEEP_S
    while True:
        strangers = children_of({os.getpid()}) - spare - children_of(spare)
        if not strangers or time.monotonic() > deadline_s:
            return not strangers
        for pid in strangers:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                pass  # it has ended, or is a child of one that was just killed
        time.sleep(0.01)


class Keeper:
    """One command from start to end."""

    def __init__(self, stop_s: float, command: list[str]) -> None:
        self._stop_s, self._patience_s = stop_s, float("inf")
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._noted)
        become_reaper()
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with(os.getpid()))

    def run(self) -> int:
        """Its exit status, as a shell gives it."""
        watched = [sys.stdin.fileno(), self._woken]
        told = False
        while (status := self._child.poll()) is None:
            left_s = self._patience_s - time.monotonic()
            if left_s < float("inf") and not told:
                self._child.terminate()
                told = True
            elif left_s <= 0:
                self._child.kill()
            ready, _, _ = select.select(watched, (), (), min(max(left_s, 0.05), 1.0))
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._reap()
            if 0 in ready and not os.read(0, 4096):
                watched.remove(0)
                self._stop(self._stop_s)
        sweep()
        return status if status >= 0 else 128 - status

    def _noted(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._stop(self._stop_s if number == signal.SIGTERM else 0.0)

    def _reap(self) -> None:
        """Orphans that have ended; the command's own status is left for `run`."""
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == self._child.pid:
                return
            os.waitpid(found.si_pid, os.WNOHANG)

    def _stop(self, within_s: float) -> None:
        self._patience_s = min(self._patience_s, time.monotonic() + within_s)


def _die_with(parent: int) -> Callable[[], None]:
    """A keeper that is killed takes its command along; what that has started falls to the keeper's own parent."""
    prctl = ctypes.CDLL(None).prctl

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    sys.exit(Keeper(float(sys.argv[1]), sys.argv[2:]).run())
