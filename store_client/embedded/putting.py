"""How pages get into the pool: batch by batch, each of which is reserved, written and published.

A device writes pages by itself. While it has the last ones of a batch to write, the next one gets its places, and while
it writes those the one before is published: else it would have nothing to do meanwhile.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Digests, Fill, Pieces, SettleFirst
from store_client.embedded.arena import GRANULE, spread
from store_client.embedded.faults import CallersOwn
from store_client.embedded.hashing import completed, digest
from store_client.embedded.locks import LockTimeout
from store_client.embedded.pool import Pool
from store_client.embedded.put import Place, PutPages, PutPlan

logger = get_logger(__name__)

_BATCH_NBYTES = 64 << 20
"""At most so much is reserved at a time: what a killed writer can hold back, and what a small pool must free."""
_BATCH_PAGES = 1024
_BEGUN_NBYTES, _BEGUN_SHARE = 256 << 20, 32
"""Of pages that a device writes, so much instead, and of a small pool a 32nd: two batches are under way at a time."""

FillAll: TypeAlias = Callable[[Sequence[tuple[int, Pieces]]], Sequence[int | None]]
"""Called with (number in the keys, writable pieces) of every page that has a place; returns for each its XXH3-64, or
None where the page is not to be stored."""
Tell: TypeAlias = Callable[[PutPages, list[str]], None]
T = TypeVar("T")


class Locked(Protocol):
    """Has something done that takes the write lock, by whichever thread, and returns or raises what that does."""

    def __call__(self, do: Callable[[], T], /) -> T: ...


def at_once(do: Callable[[], T]) -> T:
    return do()


def put_batch(nbytes: int) -> int:
    """How many pages of `nbytes` are put at a time."""
    return max(1, min(_BATCH_PAGES, _BATCH_NBYTES // max(1, nbytes)))


class Way(ABC):
    """How the pages of a put are written."""

    ahead = 0
    """So many batches are under way while a further one is begun."""

    def batch(self, pool: Pool, nbytes: int, reserved_nbytes: int) -> int:
        """How many pages of `nbytes` are put at a time, where so much is reserved by batches that are under way."""
        return put_batch(nbytes)

    @abstractmethod
    def begin(self, at: int, pool: Pool, plan: PutPlan, publish: Callable[[], None]) -> None:
        """Begin to write the pages of a plan, whose numbers count from `at`. `publish` may be called on the way: what
        was begun before is settled and published then, and else after that."""

    def end(self, counts: bool) -> None:  # noqa: B027 - most are written by then
        """Until the pages of a plan are written, and have checksums where it `counts`. Called once for each that was
        begun, in that order, also where that failed."""


class OneByOne(Way):
    """Pages are written one after the other."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill

    def begin(self, at: int, pool: Pool, plan: PutPlan, publish: Callable[[], None]) -> None:
        for place, pieces in placed(pool, plan):
            whole = _whole(pieces, plan.pages.nbytes)
            self._fill(at + place.index, whole)
            _spread(whole, pieces)
            place.checksum = digest(whole)


class Together(Way):
    """All pages are written by one call."""

    def __init__(self, fill: FillAll) -> None:
        self._fill = fill

    def begin(self, at: int, pool: Pool, plan: PutPlan, publish: Callable[[], None]) -> None:
        prepared = list(placed(pool, plan))
        if not prepared:
            return
        checksums = self._fill([(at + place.index, pieces) for place, pieces in prepared])
        if len(checksums) != len(prepared) or not all(one is None or 0 <= one < 1 << 64 for one in checksums):
            raise CallersOwn from ValueError(
                f"{len(checksums)} checksums for {len(prepared)} pages, or one of over 64 bits"
            )
        for (place, _), checksum in zip(prepared, checksums, strict=True):
            place.checksum = checksum


class ByDevice(Way):
    """A device writes the pages: they are complete once they are settled."""

    ahead = 1

    def __init__(self, fill: Fill, settle: SettleFirst) -> None:
        self._fill, self._settle = fill, settle
        self._begun: deque[list[tuple[Place, Bytes, list[Bytes]]]] = deque()
        """Of each plan the pages that were begun, each in one piece, which may be memory of its own."""

    def batch(self, pool: Pool, nbytes: int, reserved_nbytes: int) -> int:
        """(What is looked at without the lock may be outdated.)

        Where the arena has yet to grow it is what there is memory for, or as much as there: memory is secured under the
        lock, 64 MiB in some ten milliseconds.
        """
        capacity, secured = pool.arena.limit * GRANULE, pool.arena.secured_nbytes
        most = min(_BEGUN_NBYTES, capacity // _BEGUN_SHARE)
        if secured < capacity:
            most = min(most, secured - pool.table.used_granules * GRANULE - reserved_nbytes)
        return max(put_batch(nbytes), min(_BATCH_PAGES, most // max(1, nbytes)))

    def begin(self, at: int, pool: Pool, plan: PutPlan, publish: Callable[[], None]) -> None:
        begun: list[tuple[Place, Bytes, list[Bytes]]] = []
        self._begun.append(begun)
        for place, pieces in placed(pool, plan):
            if len(begun) == len(plan.places) // 2:  # the next batch is reserved when all of them are begun
                publish()
            whole = _whole(pieces, plan.pages.nbytes)
            begun.append((place, whole, pieces))
            self._fill(at + place.index, whole)

    def end(self, counts: bool) -> None:
        begun = self._begun.popleft()
        if not begun:
            return
        digests: Digests | None = self._settle(len(begun))
        if not counts:
            return
        for _, whole, pieces in begun:
            _spread(whole, pieces)
        for (place, _, _), checksum in zip(begun, completed(digests, [whole for _, whole, _ in begun]), strict=True):
            place.checksum = checksum


def placed(pool: Pool, plan: PutPlan) -> Iterator[tuple[Place, list[Bytes]]]:
    """The places of a plan, and where their pages go, with the list of a page's extents written where it needs one."""
    for place in plan.places:
        extents = place.extents
        if place.is_listed:
            listed = pool.arena.views(extents[:1], 8 * (len(extents) - 1))
            if listed is None:
                continue
            listed[0][:] = np.array(extents[1:], dtype="<u4").reshape(-1).view(np.uint8)
            extents = extents[1:]
        pieces = pool.arena.views(extents, plan.pages.nbytes)
        if pieces is not None:
            yield place, pieces


def _whole(pieces: list[Bytes], nbytes: int) -> Bytes:
    return pieces[0] if len(pieces) == 1 else np.empty(nbytes, dtype=np.uint8)


def _spread(whole: Bytes, pieces: list[Bytes]) -> None:
    if len(pieces) > 1:
        spread(whole, pieces)


class Patience:
    """How long a put waits for the write lock: whoever gets it each time waits for others, and not for one that is
    stopped, so each time as long. Who did not get it does not wait again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def take(self, step: Callable[[float], T]) -> T:
        """Make a step that takes the lock, given its deadline. Raises LockTimeout."""
        try:
            return step(time.monotonic() + self._seconds)
        except LockTimeout:
            self._seconds = 0.0
            raise


@dataclass(slots=True, eq=False)
class _Batch:
    """Pages that are reserved, written and published together; `outcome` by position, of the others `cause`."""

    pages: PutPages
    plan: PutPlan | None = None
    outcome: dict[int, str] = field(default_factory=dict)
    cause: str = "error"
    broken: bool = False
    """Whether the pool failed while they were begun."""

    @property
    def results(self) -> list[str]:
        """For each page "stored", "present" or a cause."""
        first: dict[bytes, int] = {}
        results: list[str] = []
        for i, key in enumerate(self.pages.keys):
            if first.setdefault(key, i) != i:  # twice in one put
                results.append("present" if results[first[key]] == "stored" else results[first[key]])
            else:
                results.append(self.outcome.get(i, self.cause))
        return results


class Putting:
    """One put into a pool.

    Args:
        tell: called with each batch's pages and what became of each (`_Batch.results`), in order.
    """

    def __init__(self, pool: Pool, way: Way, patience: Patience, locked: Locked, tell: Tell) -> None:
        self._pool, self._way, self._patience, self._locked, self._tell = pool, way, patience, locked, tell
        self._under_way: deque[_Batch] = deque()

    def run(self, pages: PutPages) -> None:
        """A fault of the pool costs its batch. An exception of the caller's callbacks passes: no batch is stored that
        was not by then."""
        at = 0
        try:
            while at < len(pages.keys):
                plans = [batch.plan for batch in self._under_way if batch.plan is not None]
                reserved = sum(len(plan.places) for plan in plans)
                stop = at + self._way.batch(self._pool, pages.nbytes, reserved * pages.nbytes)
                coming = [former.plan for former in self._under_way if former.plan is not None and not former.broken]
                batch = _Batch(pages.part(at, stop, coming))
                self._reserve(batch)
                self._under_way.append(batch)
                self._begin(batch, at)
                at = stop
                self._publish()
            while self._under_way:
                self._end(self._under_way.popleft())
        except BaseException:
            self._give_up()
            raise

    def _publish(self) -> None:
        while len(self._under_way) > self._way.ahead:
            self._end(self._under_way.popleft())

    def _give_up(self) -> None:
        """Nothing that is under way is stored: what failed of the last batch may have failed of pages before it too.
        Their places are given back once nothing is written there, whatever becomes of those before."""
        if not self._under_way:
            return
        batch = self._under_way.popleft()
        with suppress(CallersOwn):
            try:
                if batch.plan is not None:
                    batch.broken = True
                    self._complete(batch, batch.plan)
            finally:
                self._give_up()

    def _reserve(self, batch: _Batch) -> None:
        pages, writer = batch.pages, self._pool.writer
        with self._contained(batch):
            plan = self._patience.take(lambda deadline: self._locked(lambda: writer.reserve(pages, deadline)))
            batch.plan = plan
            batch.outcome.update(plan.outcome)

    def _begin(self, batch: _Batch, at: int) -> None:
        if batch.plan is None:
            return
        batch.broken = True
        with self._contained(batch):
            self._way.begin(at, self._pool, batch.plan, self._publish)
            batch.broken = False

    def _end(self, batch: _Batch) -> None:
        plan, writer = batch.plan, self._pool.writer
        if plan is not None:
            with self._contained(batch):
                self._complete(batch, plan)
                if not batch.broken:
                    take = self._patience.take
                    batch.outcome.update(take(lambda deadline: self._locked(lambda: writer.commit(plan, deadline))))
        self._tell(batch.pages, batch.results)

    def _complete(self, batch: _Batch, plan: PutPlan) -> None:
        try:
            self._way.end(not batch.broken)
        except BaseException:
            batch.broken = True
            raise
        finally:
            if batch.broken and plan.reservation is not None:
                self._pool.writer.abandon(plan.reservation)

    @contextmanager
    def _contained(self, batch: _Batch) -> Iterator[None]:
        """A fault of the pool fails what is not stored by then."""
        try:
            yield
        except LockTimeout:
            batch.cause = "busy"
            log_once(
                "store.busy", "pool %s: the write lock was not free in time, pages are not saved; a process that uses "
                "the pool may be stopped", self._pool.path, logger=logger,
            )  # fmt: skip
        except CallersOwn:
            raise
        except Exception as error:
            self._pool.note(error)
            log_once("store.error", "pool %s: pages are not saved: %r", self._pool.path, error, logger=logger)
