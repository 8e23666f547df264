"""Background threads of the worker half, and the jobs that go through them.

A job ends exactly once and in time. At its deadline the engine gives it up, whether it still waits in the queue, runs,
or hangs in the pool: from then on its thread touches none of the engine's blocks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from vllm_plugin.messages import LoadJob, SaveJob

logger = get_logger(__name__)


class GivenUp(Exception):
    """The engine took the blocks of a job back, or does not wait for its end any longer."""


@dataclass(slots=True)
class Task:
    """One job on its way through a thread: queued, begun, and then ended by the thread or given up by the engine.

    Args:
        fence: waits until the device has done what it was given before: a save reads what that computed, and a load
            fills blocks that it may still write for their former owner. None where there is nothing to wait for.
        pages: leading pages of a load that arrived; pages of a save that are in the pool.
        cause: why not all pages were moved; empty where they were.
    """

    job: LoadJob | SaveJob
    namespace: Namespace
    deadline_s: float
    fence: Callable[[], None] | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    pages: int = 0
    cause: str = ""
    _begun: bool = False
    _ended: bool = False
    _given_up: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def remaining_s(self) -> float:
        return self.submitted_s + self.deadline_s - time.monotonic()

    def begin(self) -> bool:
        """Called by the thread: False where the job was given up meanwhile."""
        with self._lock:
            self._begun = True
            return not self._given_up

    @contextmanager
    def touching_blocks(self) -> Iterator[None]:
        """Held by the thread while it fills blocks.

        Raises:
            GivenUp: the blocks are not the job's any more.
        """
        with self._lock:
            if self._given_up:
                raise GivenUp
            yield

    def end(self) -> bool:
        """Called by the thread when it is done: False where nobody wants to know any more."""
        with self._lock:
            if self._given_up:
                return False
            self._ended, self.ended_s = True, time.monotonic()
            return True

    def revoke(self, cause: str) -> None:
        """Called by the engine: waits for a copy under way, and the job touches no block from now on."""
        with self._lock:
            if not self._ended and not self._given_up:
                self._given_up, self.ended_s = True, time.monotonic()
                self.cause, self.deadline_s = self.cause or cause, -1.0  # it is over: not only at its deadline

    def give_up(self, *, also_begun: bool) -> bool:
        """Called by the engine: True where the job is over without an end, and touches no block from now on.

        False while a page is being moved: that takes no longer than a copy, so ask again at the next step.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._ended or (self._begun and not also_begun):
                return False
            self._given_up, self.ended_s = True, time.monotonic()
            return True
        finally:
            self._lock.release()


T = TypeVar("T", bound=Task)


class Lane(Generic[T]):
    """One background thread, its queue, and what it finished since the last step."""

    def __init__(self, name: str, run: Callable[[T], None]) -> None:
        self._run = run
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._pending: list[T] = []
        self._thread = threading.Thread(target=self._loop, name=f"mooncake-connector-{name}", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> Sequence[T]:
        """Tasks that were not collected yet."""
        return self._pending

    def submit(self, task: T) -> None:
        self._pending.append(task)
        self._queue.put(task)

    def collect(self) -> list[T]:
        """Tasks that ended or expired since the last call, each exactly once."""
        if not self._pending:
            return []
        over = []
        while not self._done.empty():
            over.append(self._done.get())
        for task in self._pending:
            if task.remaining_s < 0 and task.give_up(also_begun=True):
                task.cause = task.cause or "deadline"
                over.append(task)
        gone = {id(task) for task in over}
        self._pending = [task for task in self._pending if id(task) not in gone]
        return over

    def stop(self, timeout_s: float) -> None:
        """Drop what has not begun, and wait for what has."""
        for task in self._pending:
            task.give_up(also_begun=False)
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            if not task.begin():
                continue
            try:
                self._run(task)
            except GivenUp:
                continue
            except Exception as error:  # the thread outlives any fault of a job
                task.cause = "error"
                log_once(f"lane:{type(error).__name__}", "a job failed: %r", error, logger=logger, exc_info=True)
            if task.end():
                self._done.put(task)
