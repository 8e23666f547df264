"""Saves on one worker: a thread copies pages out of blocks that the engine may take back at any time.

Blocks are given away only between two steps, and the engine's thread hears of it before anything is written to them
(:meth:`Saver.give_away`). A page whose blocks are taken before the thread came to it is copied aside at once, as far as
there is room; otherwise it is overtaken. The thread asks after each copy whether that happened meanwhile: then it takes
what was copied aside instead, or does not store the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.kv.page import PageFormat
from mooncake_connector.log import get_logger, log_once
from store_client.base import Put
from store_client.sharded import ShardView
from vllm_plugin.blocks import BlockCopies, KVBlocks
from vllm_plugin.device_order import Wait
from vllm_plugin.messages import SaveJob, SaveResult, StepMetadata
from vllm_plugin.prefix.lane import GivenUp, Lane, Task

_PAGES_A_WRITE = 16
"""Pages written between two looks at the deadline."""
_LOCK_WAIT_S = 0.5
"""Longest wait for the pool's lock, which is held for microseconds: longer means that its holder is stopped. (Beside
eight busy processes a core a holder was seen to wait 0.15 s for its turn.)"""
_PAUSE_S = 5.0
"""After such a wait further saves are dropped for so long: the pool would only keep the next ones waiting."""
_ASIDE_NBYTES = 256 << 20
"""At most so much lies copied aside. Copying takes a small part of the time that computing it took."""

logger = get_logger(__name__)


class Overtaken(Exception):
    """The blocks of a page were given away before it was copied."""


@dataclass(slots=True)
class SaveTask(Task):
    """A save on its way through the thread. Pages are numbered in the job, `stored` were not in the pool before.

    Under the task's lock: `_over` are pages that read no block any more; `_overtaken` those whose blocks are others' by
    now, of which `_aside` has a copy or not.
    """

    job: SaveJob
    stored: int = 0
    aside_nbytes: int = 0
    _over: set[int] = field(default_factory=set)
    _overtaken: set[int] = field(default_factory=set)
    _aside: dict[int, tuple[BlockCopies, Wait | None]] = field(default_factory=dict)

    @property
    def lost(self) -> set[int]:
        """Pages that were overtaken and not copied aside."""
        with self._lock:
            return self._overtaken - self._aside.keys() - self._over

    def settle(self, numbers: Iterable[int]) -> None:
        """These pages are in the pool, or never will be: no block is read for them any more."""
        with self._lock:
            self._over.update(numbers)

    def unsettled(self, numbers: Iterable[int]) -> list[int]:
        with self._lock:
            return [number for number in numbers if number not in self._over]

    def source(self, number: int) -> tuple[BlockCopies, Wait | None] | None:
        """Where a page is to be read: aside, or in its blocks (None).

        Raises:
            GivenUp: nobody waits for the job any longer.
            Overtaken: nowhere.
        """
        with self._lock:
            if self._given_up:
                raise GivenUp
            if number in self._overtaken and number not in self._aside:
                raise Overtaken
            return self._aside.get(number)

    def reading(self, block_ids: Set[int], page_tokens: int, block_tokens: int) -> list[int]:
        """Pages that the thread may still read from one of these blocks."""
        job = self.job
        with self._lock:
            if self._ended or self._given_up or block_ids.isdisjoint(job.block_ids):
                return []
            settled = self._over | self._overtaken
        return [
            number
            for number in range(len(job.keys))
            if number not in settled and not block_ids.isdisjoint(self.blocks_of(number, page_tokens, block_tokens))
        ]

    def blocks_of(self, number: int, page_tokens: int, block_tokens: int) -> Sequence[int]:
        """The blocks that hold a page."""
        first = self.job.first_token + number * page_tokens
        return self.job.block_ids[first // block_tokens : -(-(first + page_tokens) // block_tokens)]

    def overtake(self, numbers: Iterable[int]) -> None:
        with self._lock:
            self._overtaken.update(numbers)

    def put_aside(self, numbers: Sequence[int], copies: BlockCopies, wait: Wait | None) -> None:
        with self._lock:
            self._aside.update(dict.fromkeys(numbers, (copies, wait)))
            self._overtaken.update(numbers)
        self.aside_nbytes += copies.nbytes

    def let_go(self) -> None:
        """The job is over. What lies aside goes, although a thread that hangs may keep the task in its queue."""
        with self._lock:
            self._over.update(self._aside)
            self._aside.clear()


class Saver:
    """See the module. All methods but the thread's own are the engine's.

    Args:
        view: what this rank sees of the pool in a namespace.
        writes: False where another rank stores the same heads: then every save is over at once.
    """

    def __init__(
        self, view: Callable[[Namespace], ShardView | None], fmt: PageFormat, *, writes: bool, deadline_s: float
    ) -> None:
        self._view, self._fmt, self._writes, self._deadline_s = view, fmt, writes, deadline_s
        self._blocks: KVBlocks | None = None
        self._record: Callable[[], Wait | None] = lambda: None
        self._copies_at_once = False
        self._paused_until_s = 0.0
        self._lane: Lane[SaveTask] = Lane("save", self._save)

    def register(self, blocks: KVBlocks, record: Callable[[], Wait | None], *, copies_at_once: bool) -> None:
        """Take over the KV cache.

        Args:
            record: see :func:`vllm_plugin.device_order.recorder`.
            copies_at_once: its memory may be gone between two steps.
        """
        self._blocks, self._record, self._copies_at_once = blocks, record, copies_at_once

    @property
    def pending(self) -> Sequence[SaveTask]:
        return self._lane.pending

    def submit(self, jobs: Iterable[SaveJob], namespace: Namespace) -> None:
        """Queue saves of what was computed, or launched on the device, until now."""
        fence = self._record()
        for job in jobs:
            task = SaveTask(job, namespace, self._deadline_s, fence)
            if self._copies_at_once:
                self._leave_out_stored(task)
                self._take_blocks(task, set(job.block_ids))
            self._lane.submit(task)

    def _leave_out_stored(self, task: SaveTask) -> None:
        """What is in the pool needs no room aside: a save that is larger gets further each time it is planned."""
        view = self._view(task.namespace) if self._writes else None
        if view is not None:
            task.settle(number for number, found in enumerate(view.contains(task.job.keys)) if found)

    def before_step(self, metadata: StepMetadata) -> None:
        """Called before a step writes to any block."""
        try:
            early = [job for job in metadata.saves if job.computed]
            if early:
                assert metadata.namespace is not None
                self.submit(early, metadata.namespace)
            self.give_away(metadata.given_away)
        except BaseException:
            self._overtake_all()
            raise

    def give_away(self, block_ids: Set[int] | None) -> None:
        """From when this returns on, these blocks (None: all) may hold anything."""
        if block_ids is None or block_ids:
            try:
                for task in self._lane.pending:
                    self._take_blocks(task, set(task.job.block_ids) if block_ids is None else block_ids)
            except BaseException:
                self._overtake_all()
                raise

    def _overtake_all(self) -> None:
        """What is not known to be safe is not stored."""
        for task in self._lane.pending:
            task.overtake(range(len(task.job.keys)))

    def _take_blocks(self, task: SaveTask, block_ids: Set[int]) -> None:
        """Copy pages of a save aside that read these blocks, and have the rest overtaken."""
        blocks = self._blocks
        if blocks is None or not self._writes:
            return
        numbers = task.reading(block_ids, self._fmt.page_tokens, blocks.block_tokens)
        if not numbers:
            return
        fitting = self._fitting(task, numbers, blocks)
        try:
            if fitting:
                parts = (task.blocks_of(number, self._fmt.page_tokens, blocks.block_tokens) for number in fitting)
                read = sorted(set().union(*parts))
                task.put_aside(fitting, blocks.copy(read), self._record())
        except Exception as error:  # no memory is left on the device, for one
            log_once(
                "save.aside",
                "pages could not be copied before their blocks were reused, and are not stored: %r",
                error,
                logger=logger,
            )
        task.overtake(numbers)

    def _fitting(self, task: SaveTask, numbers: Sequence[int], blocks: KVBlocks) -> list[int]:
        """The first of these pages for which there is room aside."""
        room = _ASIDE_NBYTES - sum(other.aside_nbytes for other in self._lane.pending)
        if time.monotonic() < self._paused_until_s:
            room = 0
        read: set[int] = set()
        for count, number in enumerate(numbers):
            read.update(task.blocks_of(number, self._fmt.page_tokens, blocks.block_tokens))
            if len(read) * blocks.block_nbytes > room:
                return list(numbers[:count])
        return list(numbers)

    def collect(self) -> list[SaveTask]:
        """Saves that ended or expired since the last call, each exactly once."""
        over = self._lane.collect()
        for task in over:
            task.let_go()
        return over

    def stop(self, timeout_s: float) -> None:
        self._lane.stop(timeout_s)

    # In the thread

    def _save(self, task: SaveTask) -> None:
        job = task.job
        if not self._writes:
            task.pages = len(job.keys)
            return
        view, blocks = self._view(task.namespace), self._blocks
        if view is None or blocks is None:
            task.cause = "pool_absent" if view is None else "unsupported_blocks"
            return
        if time.monotonic() < self._paused_until_s:
            task.cause = "paused"
            return
        if task.fence is not None:
            task.fence()
        present = view.contains(job.keys)
        task.settle(number for number, found in enumerate(present) if found)
        task.pages = sum(present)
        missing = task.unsettled(range(len(job.keys)))
        for start in range(0, len(missing), _PAGES_A_WRITE):
            if task.remaining_s < 0:
                task.cause = "deadline"
                return
            if not self._write(task, view, blocks, missing[start : start + _PAGES_A_WRITE]):
                return
        if task.pages < len(job.keys):
            task.cause = "overtaken"

    def _write(self, task: SaveTask, view: ShardView, blocks: KVBlocks, numbers: Sequence[int]) -> bool:
        """Store some pages of a save that are not overtaken; False where the rest is not worth trying."""
        job = task.job

        def fill(index: int, page: npt.NDArray[np.uint8]) -> None:
            first_token = job.first_token + numbers[index] * self._fmt.page_tokens
            source = task.source(numbers[index])
            if source is None:
                blocks.save_page(job.block_ids, first_token, page)
                source = task.source(numbers[index])  # or its blocks were given away meanwhile
            if source is not None:
                copies, wait = source
                if wait is not None:
                    wait()
                copies.save_page(job.block_ids, first_token, page)

        results: list[Put] = []
        started_s = time.monotonic()
        while not results:
            lost = task.lost
            numbers = [number for number in numbers if number not in lost]
            if not numbers:
                return True
            try:
                results = view.write(
                    [job.keys[number] for number in numbers],
                    fill,
                    parents=[job.keys[number - 1] if number else job.parent for number in numbers],
                    deadline_s=_LOCK_WAIT_S,
                )
            except Overtaken:  # the pool stores none of these pages then: again without those that were lost
                continue
        task.settle(numbers)
        task.stored += results.count(Put.STORED)
        task.pages += len(results) - results.count(Put.FAILED)
        if Put.FAILED not in results:
            return True
        task.cause = "pool_refused"
        if time.monotonic() - started_s >= _LOCK_WAIT_S:
            self._paused_until_s = time.monotonic() + _PAUSE_S
        return False


def result_of(task: SaveTask) -> SaveResult:
    """What the scheduler is told of a save that ended here."""
    return SaveResult(1, task.pages, min(task.lost, default=None))
