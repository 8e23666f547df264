"""A few threads for the calls of one tier, and a look at which of them do not come back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from mooncake_connector.log import get_logger, log_once
from store_client.tiers.workers import give_way

logger = get_logger(__name__)

_IDLE_S = 30.0


@dataclass(eq=False, slots=True)
class Job:
    run: Callable[[], None]
    fail: Callable[[str], None]
    """Called with the cause where it is not run, or does not come back."""
    due: float | None = None
    """When it should have come back."""
    hung: bool = False


class Lane:
    """Runs jobs in order, `width` at once, in daemon threads of its own that start when they are needed.

    A job that never returns costs its thread. Where all of them hang, the lane is stuck and takes no job any more.
    `urgent`: its threads do not give way to those of engines; somebody waits for an answer.
    """

    _current = threading.local()

    def __init__(self, name: str, width: int, *, urgent: bool = False) -> None:
        self._name, self.width, self._urgent = name, max(1, width), urgent
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def run(self, run: Callable[[], None], fail: Callable[[str], None]) -> str:
        """Have it run; returns why it will not be, or "". `fail` is called later, by another thread, where it hangs or
        the lane is closed before."""
        with self._changed:
            if self._closed:
                return "closed"
            if self._stuck():
                return "hanging"
            short = self._idle <= len(self._waiting) and self._threads < self.width
            if short and not self._start() and not self._threads:
                return "threads"
            self._waiting.append(Job(run, fail))
            self._changed.notify()
        return ""

    def _start(self) -> bool:
        try:
            threading.Thread(target=self._work, name=f"mooncake-connector-{self._name}", daemon=True).start()
        except RuntimeError as error:
            said = "no thread can be started (%s); raise the limit (`ulimit -u`)"
            log_once("agent.thread", said, error, logger=logger)
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        if not self._urgent:
            give_way()
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed, _IDLE_S)
                self._idle -= 1
                if not self._waiting:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                job = self._waiting.popleft()
                self._running.add(job)
                self._current.job = job
            try:
                job.run()
            except Exception as error:
                log_once(f"agent.{self._name}", "%s: %r", self._name, error, logger=logger, exc_info=True)
                job.fail("error")
            with self._changed:
                self._running.discard(job)
                self._changed.notify_all()

    def expect(self, allowed_s: float) -> None:
        """The job that this thread runs makes a call that should be back after so long."""
        self._current.job.due = time.monotonic() + allowed_s

    def back(self) -> bool:
        """The call came back; False where it was given up meanwhile."""
        job: Job = self._current.job
        with self._changed:
            was_given_up, job.due, job.hung = job.hung, None, False
            return not was_given_up

    def overdue(self, now: float) -> list[Job]:
        """Jobs whose call did not come back in time, each told once."""
        with self._changed:
            hung = [job for job in self._running if job.due is not None and now > job.due and not job.hung]
            for job in hung:
                job.hung = True
            if self._stuck():
                hung += self._waiting
                self._waiting.clear()
        return hung

    def _stuck(self) -> bool:
        return sum(job.hung for job in self._running) >= self.width

    @property
    def stuck(self) -> bool:
        with self._changed:
            return self._stuck()

    @property
    def busy(self) -> int:
        """Jobs under way."""
        with self._changed:
            return len(self._running)

    def close(self, deadline: float) -> bool:
        """Run nothing more; whether all calls are back by `deadline`."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for job in waiting:
            job.fail("closed")
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, max(0.0, deadline - time.monotonic()))
