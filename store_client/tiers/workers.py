"""Threads that carry out the operations of a batch, several at once, and a caller that does not wait for ever."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
Outcome = list["T | BaseException"]

NICENESS = 10
"""A tenth of the weight of another thread: where all cores are busy what engines do comes first, and this goes on."""


def give_way(niceness: int = NICENESS) -> None:
    """Have the calling thread, which moves bytes, and those that it starts give way to others, engines above all.

    The kernel weighs threads within a control group (a container, a service), or else within a session where it groups
    by those (`sched_autogroup_enabled`).
    """
    with contextlib.suppress(OSError):  # forbidden, in a container
        os.nice(niceness)  # on Linux it is the thread's own
    interrupt_nobody()


def interrupt_nobody() -> None:
    """Have the calling thread, and those that it starts, come in their turn (SCHED_BATCH): one that wakes, as after
    each read of a disk, else takes the core from an engine that reads a page, for as long as several such reads."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # the weight stays


class _Batch(Generic[T]):
    def __init__(self, operations: Sequence[Callable[[], T]]) -> None:
        self._waiting = deque(enumerate(operations))
        self._lock = threading.Lock()
        self._begun = 0
        self._left = len(operations)
        self._over = threading.Event()
        late = TimeoutError("not done in time")
        self.outcome: Outcome[T] = [late] * len(operations)

    def work(self) -> None:
        """Carry out what nobody else has begun."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                number, operation = self._waiting.popleft()
                self._begun += 1
            try:
                result: T | BaseException = operation()
            except Exception as error:
                result = error
            with self._lock:
                self.outcome[number] = result
                self._begun -= 1
                self._left -= 1
                if not self._left:
                    self._over.set()

    def wait(self, deadline: float) -> None:
        """Until all is done, or it is `deadline` and so nothing more is begun."""
        if self._over.wait(max(0.0, deadline - time.monotonic())):
            return
        with self._lock:
            self._left -= len(self._waiting)
            self._waiting.clear()
            if not self._left:
                self._over.set()

    def wait_for_the_begun(self) -> None:
        self._over.wait()


class Workers:
    """Args:
    count: operations that are under way at once.
    niceness: by so much the threads give way to others.
    """

    def __init__(self, name: str, count: int, niceness: int = NICENESS) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._count, self._niceness = count, niceness
        for number in range(count):
            threading.Thread(target=self._run, name=f"mooncake-connector-{name}-{number}", daemon=True).start()

    def _run(self) -> None:
        give_way(self._niceness)
        while (work := self._queue.get()) is not None:
            work()
            del work  # it holds memory of the caller

    def run(self, operations: Sequence[Callable[[], T]], deadline_s: float) -> Outcome[T]:
        """What each returned or raised; TimeoutError for those that were not begun within `deadline_s`.

        Operations that were begun are waited for: they use the caller's memory, and nobody can take that from them.
        """
        batch = self._start(operations)
        batch.wait(time.monotonic() + deadline_s)
        batch.wait_for_the_begun()
        return batch.outcome

    def run_or_leave(self, operations: Sequence[Callable[[], T]], deadline_s: float) -> Outcome[T]:
        """As `run`, but operations under way at the deadline are left to themselves, and are TimeoutErrors as well."""
        batch = self._start(operations)
        batch.wait(time.monotonic() + deadline_s)
        return list(batch.outcome)

    def _start(self, operations: Sequence[Callable[[], T]]) -> _Batch[T]:
        batch = _Batch(operations)
        if not operations:
            batch.wait(0.0)
        for _ in range(min(self._count, len(operations))):
            self._queue.put(batch.work)
        return batch

    def close(self) -> None:
        """The threads end once they are free."""
        for _ in range(self._count):
            self._queue.put(None)
