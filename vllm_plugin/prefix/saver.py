"""Saves on one worker: a thread copies pages out of blocks that the engine may take back at any time.

Blocks are given away only between two steps, and the engine's thread hears of it before anything is written to them
(:meth:`Saver.give_away`). A page whose blocks are taken before the thread came to it is copied aside at once, as far as
there is room; otherwise it is overtaken. The thread asks after each copy whether that happened meanwhile: then it takes
what was copied aside instead, or does not store the page. Where the word would come too late
(`Geometry.zeroes_blocks`), every page is copied aside behind the step that computed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Digests, SettleFirst
from store_client.jobs import GivenUp, Overtaken, Save
from store_client.mover import Mover
from store_client.sharded import ShardView
from transfer.device_order import Wait
from vllm_plugin.blocks import BlockCopies, KVBlocks
from vllm_plugin.device.pages import DevicePages
from vllm_plugin.kv_memory import GroupMemory, KVMemory
from vllm_plugin.messages import SaveJob, SaveResult, StepMetadata
from vllm_plugin.states import StateBlocks, StateCopies

_ASIDE_NBYTES = 256 << 20
"""At most so much lies copied aside. Copying takes a small part of the time that computing it took."""

Copies: TypeAlias = BlockCopies | StateCopies

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class BlockSave(Save):
    """A save out of the blocks of one request and group of layers.

    Under the job's lock: `_overtaken` are pages whose blocks are others' by now, of which `_aside` has a copy or not.

    Args:
        memory: of the group. Where another rank stores the same heads, the save is over at once.
    """

    plan: SaveJob
    memory: GroupMemory
    aside_nbytes: int = 0
    _overtaken: set[int] = field(default_factory=set)
    _aside: dict[int, tuple[Copies, Wait | None]] = field(default_factory=dict)

    def run(self) -> str | None:
        if self.memory.is_writer:
            return Save.run(self)
        self.pages = len(self.keys)
        return ""

    @property
    def lost(self) -> set[int]:
        """Pages that were overtaken and not copied aside."""
        with self._lock:
            return self._overtaken - self._aside.keys() - self.present

    def result(self) -> SaveResult:
        """What the scheduler is told of a save that ended here."""
        return SaveResult(1, self.pages, min(self.lost, default=None))

    def fill(self, number: int, page: Bytes) -> None:
        assert self.copy is not None
        source = self._source(number)
        if source is None:
            self.copy(number, page)
            source = self._source(number)  # or its blocks were given away meanwhile
        if source is not None:
            copies, wait = source
            if wait is not None:
                wait()
            copies.save_page(self.plan.block_ids, self.first_token(number), page)

    def _source(self, number: int) -> tuple[Copies, Wait | None] | None:
        """Where a page is to be read: aside, or in its blocks (None). Raises as `fill`."""
        with self._lock:
            if self.given_up:
                raise GivenUp
            if number in self._overtaken and number not in self._aside:
                raise Overtaken
            return self._aside.get(number)

    def reading(self, block_ids: Set[int]) -> list[int]:
        """Pages that the thread may still read from one of these blocks."""
        with self._lock:
            if self.over.is_set() or block_ids.isdisjoint(self.plan.block_ids):
                return []
            done = self.present | self._overtaken
        return [
            number
            for number in range(len(self.keys))
            if number not in done and not block_ids.isdisjoint(self.blocks_of(number))
        ]

    def first_token(self, number: int) -> int:
        return self.plan.first_token + number * self.memory.fmt.page_tokens

    def blocks_of(self, number: int) -> Sequence[int]:
        """The blocks that hold a page."""
        first, block_tokens = self.first_token(number), self.memory.group.block_tokens
        stop = first + self.memory.fmt.page_tokens
        return self.plan.block_ids[first // block_tokens : -(-stop // block_tokens)]

    def overtake(self, numbers: Iterable[int]) -> None:
        with self._lock:
            self._overtaken.update(numbers)

    def put_aside(self, numbers: Sequence[int], copies: Copies, wait: Wait | None) -> None:
        with self._lock:
            self._aside.update(dict.fromkeys(numbers, (copies, wait)))
        self.aside_nbytes += copies.nbytes

    def let_go(self) -> None:
        """The job is over. What lies aside goes, although a thread that hangs may keep the job in its queue."""
        with self._lock:
            self._overtaken.difference_update(self._aside)
            self._aside.clear()


@dataclass(slots=True, eq=False)
class _Begun:
    """A page that is being saved.

    Args:
        turn: which one it is, from 1 on, of those that the device has ever begun; 0: none.
        copies: what it is read from, instead of its blocks, which stays as long as that.
        digest: of what the device read.
    """

    number: int
    page: Bytes
    turn: int = 0
    copies: Copies | None = None
    digest: int | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceSave(BlockSave):
    """As `BlockSave`, by a device: a look at who has a page's blocks counts once the device has read them.

    Of the pages that are not settled (`_filled`), those that are not known to be read in time are `_waiting`: only they
    have to be read again, from what was copied aside, or are lost, once their blocks were given away. `_taken` are
    digests by turn, of pages that are settled for the device only.
    """

    device_pages: DevicePages
    _filled: list[_Begun] = field(default_factory=list)
    _waiting: deque[_Begun] = field(default_factory=deque)
    _taken: dict[int, int | None] = field(default_factory=dict)

    def fill(self, number: int, page: Bytes) -> None:
        one = _Begun(number, page)
        self._filled.append(one)
        self._waiting.append(one)
        self._begin(one)
        self._look()

    def _begin(self, one: _Begun) -> bool:
        """False where the page is written already."""
        one.turn = 0
        source, block_ids, first_token = self._source(one.number), self.plan.block_ids, self.first_token(one.number)
        if source is None:
            one.turn = self.device_pages.save_page(block_ids, first_token, one.page)
            return True
        copies, wait = source
        if wait is not None:
            wait()
        if self.device_pages.closed:
            copies.save_page(block_ids, first_token, one.page)
            one.copies = copies
            return False
        assert isinstance(copies, BlockCopies)
        one.turn = self.device_pages.save_copied(copies, block_ids, first_token, one.page)
        one.copies = copies  # not before: else a page that could not be begun counts as read from there
        return True

    def _look(self) -> None:
        """See which pages were read in time; those that were not are begun anew."""
        while self._waiting:
            one = self._waiting[0]
            if one.turn > self.device_pages.saved:
                break
            if self._was_overtaken(one) and self._begin(one):
                break
            self._waiting.popleft()

    def _was_overtaken(self, one: _Begun) -> bool:
        """Whether a page's blocks were given away before they were read, so that what was copied aside is to be."""
        return one.copies is None and self._source(one.number) is not None

    @property
    def settle(self) -> SettleFirst:
        return self._settle

    def _settle(self, count: int) -> Digests:
        first, self._filled = self._filled[:count], self._filled[count:]
        pages, waiting = set(first), []
        while self._waiting and self._waiting[0] in pages:
            waiting.append(self._waiting.popleft())
        self._settle_turns(first)
        again: list[_Begun] = []
        try:
            for one in waiting:
                if self._was_overtaken(one):
                    again.append(one)
                    self._begin(one)
        finally:
            self._settle_turns(again)
        return [one.digest for one in first]

    def _settle_turns(self, pages: Sequence[_Begun]) -> None:
        """Have these pages written; with those of the next batch, if there are any, the device goes on."""
        last, settled = max((one.turn for one in pages), default=0), self.device_pages.settled
        if last > settled:
            digests = self.device_pages.settle_saves(last if self._filled else None)
            self._taken.update(enumerate(digests, settled + 1))
        for one in pages:
            one.digest = self._taken[one.turn] if one.turn else None
        if not self._filled:
            self._taken.clear()


class Saver:
    """See the module. All methods are the engine's; `view` is what this rank sees of a group in the pool."""

    def __init__(
        self, view: Callable[[Namespace, int], ShardView | None], memory: KVMemory, *, deadline_s: float
    ) -> None:
        self._view, self._memory, self._deadline_s = view, memory, deadline_s
        self._mover: Mover[BlockSave] = Mover("save")
        self._idle: dict[int, SaveResult] = {}
        """Of groups of which this rank has no layers."""

    @property
    def pending(self) -> Sequence[BlockSave]:
        return self._mover.pending

    def submit(self, jobs: Iterable[SaveJob], namespace: Namespace) -> None:
        """Queue saves of what was computed, or launched on the device, until now."""
        fence = self._memory.record()
        at_once = self._memory.sleeps or self._memory.geometry.zeroes_blocks  # as is any model that keeps states
        for plan in jobs:
            if plan.group not in self._memory.groups:
                self._idle[plan.job_id] = SaveResult(1, len(plan.keys))
                continue
            save = self._save(plan, namespace, fence)
            if at_once:
                self._leave_out_stored(save)
                self._take_blocks(save, set(plan.block_ids))
            self._mover.submit(save)

    def _save(self, plan: SaveJob, namespace: Namespace, fence: Wait | None) -> BlockSave:
        memory = self._memory.groups[plan.group]
        blocks, page_tokens = memory.blocks, memory.fmt.page_tokens

        def copy(number: int, page: Bytes) -> None:
            assert blocks is not None
            blocks.save_page(plan.block_ids, plan.first_token + number * page_tokens, page)

        job: dict[str, Any] = {
            "keys": plan.keys, "parent": plan.parent, "view": partial(self._view, namespace, plan.group),
            "deadline_s": self._deadline_s, "fence": fence, "copy": copy if blocks is not None else None, "plan": plan,
            "memory": memory,
        }  # fmt: skip
        return BlockSave(**job) if memory.device_pages is None else DeviceSave(**job, device_pages=memory.device_pages)

    def _leave_out_stored(self, save: BlockSave) -> None:
        """What is in the pool needs no room aside: a save that is larger gets further each time it is planned."""
        view = save.view() if save.memory.is_writer else None
        if view is not None:
            save.leave_out_present(view)

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
                for save in self.pending:
                    self._take_blocks(save, set(save.plan.block_ids) if block_ids is None else block_ids)
            except BaseException:
                self._overtake_all()
                raise

    def _overtake_all(self) -> None:
        """What is not known to be safe is not stored."""
        for save in self.pending:
            save.overtake(range(len(save.keys)))

    def _take_blocks(self, save: BlockSave, block_ids: Set[int]) -> None:
        """Copy pages of a save aside that read these blocks, and have the rest overtaken."""
        blocks = save.memory.blocks
        if blocks is None or not save.memory.is_writer:
            return
        numbers = save.reading(block_ids)
        if not numbers:
            return
        fitting = self._fitting(save, numbers, blocks)
        try:
            if fitting:
                read = sorted(set().union(*map(save.blocks_of, fitting)))
                save.put_aside(fitting, blocks.copy(read), self._memory.record())
        except Exception as error:  # no memory is left on the device, for one
            said = "pages could not be copied before their blocks were reused, and are not stored: %r"
            log_once("save.aside", said, error, logger=logger)
        save.overtake(numbers)

    def _fitting(self, save: BlockSave, numbers: Sequence[int], blocks: KVBlocks | StateBlocks) -> list[int]:
        """The first of these pages for which there is room aside."""
        room = 0 if self._mover.paused else _ASIDE_NBYTES - sum(other.aside_nbytes for other in self.pending)
        read: set[int] = set()
        for count, number in enumerate(numbers):
            read.update(save.blocks_of(number))
            if len(read) * blocks.block_nbytes > room:
                return list(numbers[:count])
        return list(numbers)

    def take_ended(self) -> list[BlockSave]:
        """Saves that ended or expired since the last call, each exactly once."""
        over = self._mover.take_ended()
        for save in over:
            save.let_go()
        return over

    def take_idle(self) -> dict[int, SaveResult]:
        """Results of saves for which there is nothing to do here, by job."""
        idle, self._idle = self._idle, {}
        return idle

    def stop(self, timeout_s: float) -> bool:
        return self._mover.stop(timeout_s)
