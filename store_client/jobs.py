"""Jobs: moves of pages between an engine's memory and a store, of which each ends exactly once and in time.

A job is run by the thread of a :class:`store_client.mover.Mover`. The engine may give it up at any time; from then on
none of its memory is touched. What an adapter adds is how one page is copied.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.kv.geometry import Shard
from store_client.base import Bytes, Digests, Lookup, Put, Settle, SettleFirst
from store_client.sharded import ConsumePart, ShardView

_MOVE_NBYTES, _MOVE_PAGES = 64 << 20, 16
"""So many bytes are moved between two looks at the clock, but at least so many pages: they are lost when a job is given
up meanwhile, and each move costs the store a transaction, about 1 ms a write."""
_BEGUN_NBYTES, _BEGUN_PAGES = 1 << 30, 1024
"""So many where a device carries out the copies: at each end it has nothing to do for about a millisecond, and PCIe 5
carries 1 GiB in 20. (Pages that it cannot move by itself take longer: a second for 1 GiB.) Of a save at most so many
pages."""
_MOST_DEADLINES = 10
"""A load that goes on page by page ends after so many of its deadlines: others wait for the same thread."""
_HEARING_S = 0.5
"""A store that was told elsewhere that pages are coming says so here within so long, or they are lost. It counts
from the last page that arrived: those behind it may be in other shards, which are asked for only then."""
NOT_LANDED = "not_landed"
"""Why a load ends whose next page was on its way until the deadline: that is no fault of the pool."""
_NOT_HEARD = "not_heard"
"""Why one ends whose next page was promised elsewhere, and here who was asked for it says nothing."""
LATE = (NOT_LANDED, _NOT_HEARD)
"""Pages that may be on their way all the same."""
_LOCK_WAIT_S = 0.5
"""Longest wait for the store's lock, which is held for microseconds: longer means that its holder is stopped. (Beside
eight busy processes a core a holder was seen to wait 0.15 s for its turn.)"""


class GivenUp(Exception):
    """The engine took the memory of a job back, or does not wait for its end any longer."""


class Overtaken(Exception):
    """A page's memory went to somebody else before it was copied; other pages of the save may still be stored."""


class CopyFailed(MooncakeConnectorError):
    """The engine's memory could not be read or written, for instance by its device: no fault of the store."""


@dataclass(slots=True, kw_only=True, eq=False)
class Job(ABC):
    """One load or save: submitted, begun, and then ended by the thread or given up by the engine.

    Args:
        keys: consecutive pages of a chain.
        view: the pages in the store, or None while there is no store.
        deadline_s: see `left_s`.
        copy: moves one page; None where the engine's memory is not understood.
        fence: waits until the device has done what it was given before: a save reads what that computed, and a load
            fills memory that it may still write for its former owner. None where there is nothing to wait for.
        passed: whether `fence` would return at once; None where nobody can say, so that it is called all the same.
        pages: leading pages of a load that arrived; pages of a save that are in the store.
        cause: why not all pages were moved; empty where they were.
        awaits: whether the next page was on its way at the last look, so that there is nothing to move for now.
        over: set when the job has ended or was given up; from then on nothing here changes.
    """

    keys: Sequence[bytes]
    view: Callable[[], ShardView | None]
    deadline_s: float
    copy: Callable[..., None] | None
    fence: Callable[[], None] | None = None
    passed: Callable[[], bool] | None = None
    pages: int = 0
    cause: str = ""
    awaits: bool = False
    begun_s: float = 0.0
    given_up: bool = False
    submitted_s: float = field(default_factory=time.monotonic)
    since_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @abstractmethod
    def move(self, view: ShardView) -> str | None:
        """Move what can be moved now. Returns as `run`."""

    @property
    def late_cause(self) -> str:
        """Why the job ends where it is given up at its deadline now."""
        return "deadline"

    @property
    def left_s(self) -> float:
        """Seconds until the deadline: of a save since it was submitted, of a load since the last page arrived.

        Of a load that was begun also until it has taken too long in all.
        """
        late_s = self.since_s + self.deadline_s
        if self.begun:
            late_s = min(late_s, self.begun_s + _MOST_DEADLINES * self.deadline_s)
        return late_s - time.monotonic()

    @property
    def begun(self) -> bool:
        return self.begun_s > 0

    @property
    def fenced(self) -> bool:
        """Whether the device is still at what it was given before, while others may have their turn."""
        return self.fence is not None and self.passed is not None and not self.passed()

    @property
    def seconds(self) -> float:
        """From submission to end."""
        return self.ended_s - self.submitted_s

    @contextmanager
    def holding_memory(self) -> Iterator[None]:
        """Held while the memory is touched, or what the engine reads of the job is changed.

        Raises:
            GivenUp: the memory is not the job's any more.
        """
        with self._lock:
            if self.given_up:
                raise GivenUp
            yield

    def run(self) -> str | None:
        """Called by the thread, to begin the job or go on with it.

        Returns why it ends, which is empty where all pages were moved; None where to call again in a moment.
        """
        self.begun_s = self.begun_s or time.monotonic()
        if self.given_up:
            raise GivenUp
        view = self.view()
        if view is None:
            return "pool_absent"
        if self.copy is None:
            return "unsupported_blocks"
        if self.fenced:
            return self.late_cause if self.left_s < 0 else None
        fence, self.fence = self.fence, None
        if fence is not None:
            fence()
        return self.move(view)

    def give_up(self, cause: str, *, wait: bool = True) -> bool:
        """Called by the engine: True where this ends the job, which touches no memory from now on.

        What is being moved is waited for, or else the answer is False: a page, or up to 1 GiB that a device has begun.
        """
        return self.end(cause, given_up=True, wait=wait)

    def end(self, cause: str, *, given_up: bool = False, wait: bool = True) -> bool:
        """Called by the thread when it is done; changes nothing where the job was given up meanwhile."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            if self.over.is_set():
                return False
            self.given_up, self.ended_s = given_up, time.monotonic()
            self.cause = cause if self.pages < len(self.keys) else ""
            self.over.set()
            return True
        finally:
            self._lock.release()


@dataclass(slots=True, kw_only=True, eq=False)
class Load(Job):
    """Pages from the store into the engine's memory, from the first on, until one is not to be had.

    Moves some at a time, so that other loads have their turn in between. A page that the store says is on its way is
    waited for, as long as pages arrive.

    Args:
        copy: takes page i out of the stored page of a part.
        settle: waits until the copies are over that `copy` only begins, and returns digests (`Settle`); None where it
            carries them out.
        num_coming: pages, the last ones, that were not there when the load was planned: somebody was told then that
            they are being fetched, and this process may have to ask for itself.
    """

    copy: ConsumePart | None
    settle: Settle | None = None
    num_coming: int = 0
    _announced: bool = False
    _heard: bool = False
    """Whether the store has said of the next page that it is coming."""

    @property
    def late_cause(self) -> str:
        return NOT_LANDED if self.awaits else "deadline"

    def move(self, view: ShardView) -> str | None:
        if self.num_coming and not self._announced:
            self._announced = True
            view.prefetch(self.keys, deadline_s=_MOST_DEADLINES * self.deadline_s)
        if not self.keys:
            return ""
        step = _pages_a_move(view, _MOVE_NBYTES if self.settle is None else _BEGUN_NBYTES)
        keys = self.keys[self.pages : self.pages + step]
        there = view.lookup(keys)
        self.awaits = there.pages == 0 and self._is_coming(there)
        if self.awaits:
            return self.late_cause if self.left_s < 0 else None
        if there.pages == 0 and there.unheard and self._is_promised:
            return _NOT_HEARD
        if there.pages == 0 or self._read(view, keys[: there.pages]) < there.pages:
            return "page_lost"
        self._heard = there.coming > 0
        return "" if self.pages == len(self.keys) else None

    def _is_coming(self, there: Lookup) -> bool:
        """Whether the next page is on its way; also where the store, just asked, may not have heard of it yet."""
        if there.pending or there.coming:
            self._heard = self._heard or there.coming > 0
            return True
        hearing_until_s = max(self.begun_s, self.since_s) + _HEARING_S
        return self._is_promised and not self._heard and time.monotonic() < hearing_until_s

    @property
    def _is_promised(self) -> bool:
        return self.pages >= len(self.keys) - self.num_coming

    def _read(self, view: ShardView, keys: Sequence[bytes]) -> int:
        """How many of these pages arrived, from the first on."""
        first, copy = self.pages, self.copy
        assert copy is not None

        def consume(index: int, part: Shard, page: Bytes) -> None:
            with self.holding_memory():
                copy(first + index, part, page)

        settle = self.settle
        found = view.read(keys, consume) if settle is None else self._read_begun(view, keys, settle)
        arrived = len(found) if all(found) else found.index(False)
        with self.holding_memory():
            self.pages += arrived
            if arrived:
                self.since_s = time.monotonic()
        return arrived

    def _read_begun(self, view: ShardView, keys: Sequence[bytes], settle: Settle) -> list[bool]:
        """As `ShardView.read`; the memory is held from the first copy that is begun until all are over."""
        first, copy, held = self.pages, self.copy, ExitStack()
        begun = False
        assert copy is not None

        def begin(index: int, part: Shard, page: Bytes) -> None:
            nonlocal begun
            if not begun:
                held.enter_context(self.holding_memory())
                begun = True
            copy(first + index, part, page)

        def end() -> Digests | None:
            nonlocal begun
            begun = False
            with held:
                return settle()

        return view.read(keys, begin, settle=end)


@dataclass(slots=True, kw_only=True, eq=False)
class Save(Job):
    """Pages from the engine's memory into the store, as far as it lacks them.

    Args:
        parent: key of the page before the first one, or None at the root.
        copy: writes page i into the page of this rank's shard.
        stored: pages that were not in the store before.
        present: numbers of the pages that are in the store: no memory is read for them any more.
    """

    parent: bytes | None
    copy: Callable[[int, Bytes], None] | None
    stored: int = 0
    present: set[int] = field(default_factory=set)

    @property
    def lost(self) -> Collection[int]:
        """Pages whose memory went to somebody else before they were copied."""
        return ()

    @property
    def settle(self) -> SettleFirst | None:
        """As that of a load, for what `fill` begins, of the first pages; raises as it."""
        return None

    def fill(self, number: int, page: Bytes) -> None:
        """Copy a page out of the engine's memory.

        Raises:
            GivenUp: nobody waits for the job any longer.
            Overtaken: the page is one of `lost`.
        """
        assert self.copy is not None
        with self.holding_memory():
            self.copy(number, page)

    def leave_out_present(self, view: ShardView) -> None:
        """Ask the store which pages it has."""
        self._note(number for number, found in enumerate(view.contains(self.keys)) if found)

    def _note(self, present: Iterable[int], stored: int = 0) -> None:
        with self.holding_memory():
            self.stored += stored
            self.present.update(present)
            self.pages = len(self.present)

    def move(self, view: ShardView) -> str | None:
        self.leave_out_present(view)
        missing = [number for number in range(len(self.keys)) if number not in self.present]
        step = _pages_a_move(view, _MOVE_NBYTES)
        if self.settle is not None:
            step = min(_BEGUN_PAGES, _pages_a_move(view, _BEGUN_NBYTES))
        for start in range(0, len(missing), step):
            if self.left_s < 0:
                return "deadline"
            if cause := self._write(view, missing[start : start + step]):
                return cause
        return "overtaken" if self.pages < len(self.keys) else ""

    def _write(self, view: ShardView, numbers: Sequence[int]) -> str:
        """Store those of these pages that are not lost; why the rest of the job is not worth trying, or nothing."""

        results: list[Put] = []
        # Since when it waits for the store and does nothing else, and how long it did at most.
        waits_s, longest_s = time.monotonic(), 0.0

        def goes_on(waiting: bool) -> None:
            nonlocal waits_s, longest_s
            now_s = time.monotonic()
            waits_s, longest_s = now_s, max(longest_s, now_s - waits_s) if waiting else longest_s

        def fill(index: int, page: Bytes) -> None:
            goes_on(True)
            try:
                self.fill(numbers[index], page)
            finally:
                goes_on(False)

        settle = self.settle

        def end(count: int) -> Digests | None:
            assert settle is not None
            goes_on(True)
            try:
                return settle(count)
            finally:
                goes_on(False)

        while not results:
            out = {*self.lost, *self.present}
            numbers = [number for number in numbers if number not in out]
            if not numbers:
                return ""
            try:
                results = view.write(
                    [self.keys[number] for number in numbers],
                    fill,
                    parents=[self.keys[number - 1] if number else self.parent for number in numbers],
                    deadline_s=_LOCK_WAIT_S,
                    settle=None if settle is None else end,
                )
            except Overtaken:  # again without those that were lost, and those that the store took before
                known = len(self.present)
                self.leave_out_present(view)
                self._note((), len(self.present) - known)
        present = [number for number, put in zip(numbers, results, strict=True) if put is not Put.FAILED]
        self._note(present, results.count(Put.STORED))
        if Put.FAILED not in results:
            return ""
        goes_on(True)
        return "busy" if longest_s >= _LOCK_WAIT_S else "refused"


def _pages_a_move(view: ShardView, nbytes: int) -> int:
    return max(_MOVE_PAGES, nbytes // view.nbytes)
