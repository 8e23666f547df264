"""The thread that runs an engine's jobs: saves one after the other, loads in turns (:mod:`store_client.jobs`).

The engine submits jobs and collects those that are over, or has one run and waits for its end. Either way each ends at
its deadline at the latest, whether it still waits for its turn, moves pages, or hangs in the store.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Generic, TypeVar

from mooncake_connector.log import get_logger, log_once
from store_client.jobs import CopyFailed, GivenUp, Job

PAUSE_S = 5.0
"""After a fault of the store it is left alone for so long: the next jobs would only wait as well."""
_FAILED_COPIES = 3
"""After so many jobs in a row whose copies failed as well: the device is out of order, not one copy."""
_LOOK_S, _FENCE_LOOK_S, _WANTED_LOOK_S = 0.005, 0.001, 0.05
"""Between two looks at pages that are on their way, at a device that is busy, and at whether a load is still wanted."""
UNWANTED = "unwanted"
"""Why a job ended that nobody waited for any more: no fault."""

J = TypeVar("J", bound=Job)

logger = get_logger(__name__)
_OUTCOME = {"load": "the rest is computed", "save": "the rest is not stored"}


class Mover(Generic[J]):
    """One background thread, its queue of jobs, and those that were not collected yet.

    The thread is started with the first job, also again after `stop`.

    Args:
        name: "load" or "save", for the thread's name and the log.
        pauses_after: causes after which the store is left alone for a while.
        pending: jobs that were not collected yet.
    """

    def __init__(self, name: str, pauses_after: Collection[str] = ("busy",)) -> None:
        self._name, self._pauses_after = name, pauses_after
        self.pending: list[J] = []
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running: J | None = None
        self._moved_s = 0.0
        self._paused_until_s = 0.0
        self._failed_copies = 0
        """Jobs in a row."""

    @property
    def paused(self) -> bool:
        return time.monotonic() < self._paused_until_s

    @property
    def hangs(self) -> bool:
        """Whether the thread is in a job that was given up: another one would wait in vain. Not where nobody wanted the
        job any more: it may be over in a moment."""
        running = self._running
        return running is not None and running.given_up and running.cause != UNWANTED

    @property
    def stuck(self) -> bool:
        """Whether the thread is in a job that is long past its deadline and cannot be given up: a device that hangs may
        write to its memory at any time."""
        running = self._running
        return running is not None and not running.over.is_set() and running.left_s < -running.deadline_s

    def pause(self) -> None:
        """Jobs that would begin in the next `PAUSE_S` end at once instead."""
        self._paused_until_s = time.monotonic() + PAUSE_S

    def submit(self, job: J) -> None:
        self.pending.append(job)
        try:
            with self._lock:
                if self._thread is None:
                    self._start()
                self._queue.put(job)
        except RuntimeError as error:  # no thread can be started
            self._fail(job, error)

    def take_ended(self) -> list[J]:
        """Jobs that ended or expired since the last call, each exactly once. Waits for nothing."""
        over = [job for job in self.pending if job.over.is_set() or self._expire(job, wait=False)]
        if over:
            gone = set(over)
            self.pending = [job for job in self.pending if job not in gone]
        for job in over:
            self._tell(job)
        return over

    def run(self, job: J, wanted: Callable[[], bool] | None = None) -> None:
        """Submit a job and wait until it is over; one that is not `wanted` any more is given up."""
        self.submit(job)
        while not job.over.wait(max(job.left_s, _LOOK_S) if wanted is None else _WANTED_LOOK_S):
            if wanted is not None and not wanted():
                job.give_up(UNWANTED)
            self._expire(job, wait=True)
        self.pending.remove(job)
        self._tell(job)

    def stop(self, timeout_s: float) -> bool:
        """Drop what has not begun, and wait for what has; False where it is not over in time."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._queue.put(None)
        for job in list(self.pending):
            if not job.begun:
                job.give_up("stopped")
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _expire(self, job: J, *, wait: bool) -> bool:
        """Give a job up that is late, unless the thread looks at it when the job that it runs has moved its pages."""
        self._catch_up(job)
        running = self._running
        is_next = job.begun and running is not None and running is not job and not running.given_up
        if job.left_s > 0 or is_next or not job.give_up(job.late_cause, wait=wait):
            return False
        if job.cause in self._pauses_after:
            self.pause()
        return True

    def _catch_up(self, job: J) -> None:
        """While a load waits for its turn, pages that arrive for the others are progress for it as well."""
        if not job.begun:
            running = self._running
            job.since_s = max(job.since_s, self._moved_s, running.since_s if running is not None else 0.0)

    def _tell(self, job: J) -> None:
        told = (self._name, job.seconds, job.pages, len(job.keys), job.cause or "none")
        logger.debug("a %s ended after %.6f s with %d of %d pages: %s", *told)
        if job.cause not in ("", UNWANTED):
            log_once(
                f"{self._name}.{job.cause}",
                "a %s ended after %.3f s with %d of %d pages: %s; %s (logged once per cause, counted in the metrics)",
                *told, _OUTCOME[self._name],
                logger=logger,
            )  # fmt: skip

    def _start(self) -> None:
        jobs: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._loop, args=(jobs,), name=f"mooncake-connector-{self._name}", daemon=True)
        thread.start()
        self._thread, self._queue = thread, jobs

    # In the thread

    def _loop(self, jobs: queue.SimpleQueue[J | None]) -> None:
        waiting: list[J] = []
        ending = False
        while not ending or not all(job.awaits for job in waiting):
            new: list[J] = []
            with suppress(queue.Empty):
                job = jobs.get(timeout=_look_s(waiting))
                while job is not None:
                    new.append(job)
                    job = jobs.get_nowait()
                ending = True
            turn = [*new, *waiting]
            waiting = [job for job in turn if not self._advance(job, turn)]
        for job in waiting:
            job.end("stopped")

    def _advance(self, job: J, turn: Collection[J]) -> bool:
        """Go on with a job of those whose turn it is; False where it is not at its end."""
        self._catch_up(job)
        started_s, had = time.monotonic(), job.pages
        self._running = job
        try:
            cause = "paused" if self.paused else job.run()
            if cause is None:
                return False
            self._end(job, cause)
        except GivenUp:
            pass
        except CopyFailed as error:
            log_once(f"mover.{self._name}.copy", "a %s failed: %s", self._name, error, logger=logger)
            self._count_failed_copy()
            self._end(job, "copy")
        except Exception as error:  # the thread outlives any fault of a job
            self._fail(job, error)
        finally:
            self._moved_s = max(self._moved_s, job.since_s)
            if job.pages > had:  # what the others wait for may have landed meanwhile, and is yet to be looked at
                for other in turn:
                    if other is not job and other.begun and not other.over.is_set():
                        other.since_s += time.monotonic() - started_s
                        other.begun_s += time.monotonic() - started_s
            self._running = None
        return True

    def _fail(self, job: J, error: Exception) -> None:
        kind = f"mover.{self._name}:{type(error).__name__}"
        log_once(kind, "a %s failed: %r", self._name, error, logger=logger, exc_info=True)
        self._end(job, "error")

    def _count_failed_copy(self) -> None:
        self._failed_copies += 1
        if self._failed_copies >= _FAILED_COPIES:
            self.pause()
            said = "the copies of %d %ss in a row failed: none is tried for a while, and then one (logged once)"
            log_once(f"mover.{self._name}.copies", said, self._failed_copies, self._name, logger=logger)

    def _end(self, job: J, cause: str) -> None:
        if job.pages and cause not in ("copy", "paused"):
            self._failed_copies = 0
        if cause in self._pauses_after:
            self.pause()
        job.end(cause)


def _look_s(waiting: Collection[Job]) -> float | None:
    """How long to wait for another job beside these: for ever, until the next look at what is coming, or not at all."""
    if not waiting:
        return None
    if all(job.awaits for job in waiting):
        return _LOOK_S
    return _FENCE_LOOK_S if all(job.awaits or job.fenced for job in waiting) else 0.0
