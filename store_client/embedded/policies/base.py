"""What a policy sees of a pool, and what it decides: pages as columns, and which of them go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from store_client.embedded.names import U8, U32, U64, Slots
from store_client.embedded.policies.hints import Hints


class Rank(Protocol):
    """A number for each page; the lowest goes first."""

    def all(self, slots: Slots) -> npt.NDArray[Any]: ...

    def one(self, slot: int) -> float:
        """The same, for one page, which takes an array ten times as long."""
        ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """All pages of a pool, as columns over the slots of its table. Slots without a page have `granules` 0."""

    access: U64
    """`table.now_ns()` of the last use; never ahead of now."""
    uses: U8
    """How often it was used since it was stored, up to `table.MOST_USES`. What a policy writes here is kept."""
    parent: U32
    """Slot of the page before it in its chain, or NONE."""
    depth: U32
    """Greater than the parent's."""
    granules: U32
    count: int
    """How many pages there are."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Pages that were just stored, in the order of their chains."""

    slots: Slots
    prints: U64
    """Hashes of their names."""
    parents: U32
    """Slot of the page before each in its chain, or beyond the table."""
    parent_uses: U8
    """How often that page was used since it was stored."""
    count: int
    """How many pages there are in the pool."""


class Policy(ABC):
    """Decides for the holder of the write lock, and keeps what it knows in the pool's hints.

    Hints may be anybody's leftovers, of a killed writer or another policy: they make a decision better or worse, never
    impossible.
    """

    name: str

    def __init__(self, hints: Hints) -> None:
        self.hints = hints
        self._room = Room()

    def frontier(self, pages: Candidates, used_before_ns: int) -> Frontier:
        return Frontier(pages, used_before_ns, self._room)

    def stored(self, new: Arrivals, now_ns: int) -> None:  # noqa: B027 a policy may want to know nothing
        """These pages were just stored."""

    @abstractmethod
    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int, now_ns: int) -> Slots:
        """Slots to evict, in order, that together free `granules` and number `count`, or all that may go.

        No page comes before one of its descendants, and none that was used, itself or through a descendant, at or
        after `used_before_ns` comes at all.
        """

    def evicted(self, slots: Slots, prints: U64) -> None:  # noqa: B027
        """These pages go now; `prints` are hashes of their names."""


class Room:
    """Memory of a `Frontier`, 8 bytes a slot, for the next one to fill. Given back to the system in between it would
    come anew page by page, which takes as long as all the rest of a choice."""

    def __init__(self) -> None:
        self._parents: npt.NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def parents(self, num_slots: int) -> npt.NDArray[np.intp]:
        if len(self._parents) < num_slots:
            self._parents = np.empty(num_slots, dtype=np.intp)
        return self._parents[:num_slots]


class Frontier:
    """The ends of the chains, and how they move up as pages go: the pages that may go without leaving a descendant.

    Single values are read through memoryviews, in a third of the time that an array takes. One at a time has a room.
    """

    def __init__(self, pages: Candidates, used_before_ns: int, room: Room) -> None:
        self.pages, self.used_before_ns = pages, used_before_ns
        num_slots = len(pages.granules)
        self.there: npt.NDArray[np.bool_] = pages.granules != 0
        parents = room.parents(num_slots)
        parents[:] = pages.parent
        # A link may be stale, its parent gone and the slot another page's: depths keep links from going round.
        depth = pages.depth.view(np.int32)
        stale = depth.take(parents, mode="clip") >= depth  # "clip" as the quickest: what is beyond has no parent
        stale &= pages.parent < num_slots
        if not self.there.all():
            stale |= ~self.there
            stale |= ~self.there.take(parents, mode="clip")
        np.minimum(parents, num_slots, out=parents)
        if stale.any():
            parents[stale] = num_slots
        num_children = np.bincount(parents, minlength=num_slots + 1)
        ends = np.flatnonzero(num_children[:num_slots] == 0)
        self.ends: Slots = ends[self.there[ends] & (pages.access[ends] < used_before_ns)]
        """The pages that may go at once."""
        self._pages_an_end = max(1, pages.count) / max(1, len(self.ends))
        self.granules, self.access = pages.granules.data, pages.access.data
        self.parents = parents.data
        """Slot of the page before each in its chain; `num_slots` where there is none."""
        num_children[num_slots] = 0
        self.children = num_children.data
        """How many each page has left; below one at `num_slots`."""
        self.num_slots = num_slots

    def likely(self, granules: int, count: int) -> int:
        """Of how many ends the chains have so many pages and granules, and some more."""
        some = self.ends[:16]
        of_one = sum(map(self.granules.__getitem__, some.tolist())) / max(1, len(some))
        return int(1.25 * max(count, granules / max(1.0, of_one)) / self._pages_an_end) + 8


def lowest_first(frontier: Frontier, granules: int, count: int, rank: Rank, kind: U8 | None = None) -> Slots:
    """Victims in the order of `rank`, as far as descendants allow. See `Policy.victims`.

    Pages of one last use and one `kind` (a column) rank alike: of a chain they go together, without a further look.
    """
    pages, ends, used_before_ns = frontier.pages, frontier.ends, frontier.used_before_ns
    if not len(ends):
        return ends
    sizes, access, depth = frontier.granules, frontier.access, pages.depth.data
    parents, children = frontier.parents, frontier.children
    kinds = (np.zeros(frontier.num_slots, dtype=np.uint8) if kind is None else kind).data
    heights = -pages.depth[ends].astype(np.int64)  # of those that rank alike the deepest goes first
    queue = Ends(ends, rank.all(ends), heights, frontier.likely(granules, count))
    first = queue.next()
    risen: list[tuple[float, int, int]] = []
    going: list[int] = []
    go = going.append
    freed = 0
    while freed < granules or len(going) < count:
        if risen and (first is None or risen[0] < first):
            slot = heappop(risen)[2]
        elif first is not None:
            slot = first[2]
            first = queue.next()
        else:
            break
        used, own = access[slot], kinds[slot]
        while True:
            go(slot)
            freed += sizes[slot]
            slot = parents[slot]
            if (left := children[slot]) != 1:  # also where there is none before it
                children[slot] = left - 1
                break
            if (before := access[slot]) != used or kinds[slot] != own:
                if before < used_before_ns:
                    heappush(risen, (rank.one(slot), -depth[slot], slot))
                break
            if freed >= granules and len(going) >= count:
                break
    return np.array(going, dtype=np.int64)


class Ends:
    """Ends of chains as (rank, height, slot), the lowest first. They are sorted as they are wanted: the first `batch`,
    then twice as many. Without heights those that rank alike come in the order of `slots`."""

    def __init__(self, slots: Slots, ranks: npt.NDArray[Any], heights: npt.NDArray[Any] | None, batch: int) -> None:
        self._slots, self._ranks, self._heights, self._batch = slots, ranks, heights, batch
        self._later: npt.NDArray[np.bool_] | None = None
        """Which of them were not sorted yet; None: none was."""
        self._sorted: Iterator[tuple[float, int, int]] = iter(())

    def next(self) -> tuple[float, int, int] | None:
        found = next(self._sorted, None)
        if found is None and len(self._slots):
            self._sort()
            found = next(self._sorted, None)
        return found

    def _sort(self) -> None:
        if self._later is not None:
            self._slots, self._ranks = self._slots[self._later], self._ranks[self._later]
            self._heights = self._heights[self._later] if self._heights is not None else None
        slots, ranks, heights = self._slots, self._ranks, self._heights
        if self._batch < len(slots):
            self._later = ranks > np.partition(ranks, self._batch)[self._batch]  # not those that rank alike
            is_first = np.flatnonzero(~self._later)
            slots, ranks = slots[is_first], ranks[is_first]
            heights = heights[is_first] if heights is not None else None
            self._batch *= 2
        else:
            self._slots = slots[:0]
        order = ranks.argsort(kind="stable") if heights is None else np.lexsort((heights, ranks))
        sorted_heights = repeat(0) if heights is None else heights[order].tolist()
        self._sorted = zip(
            ranks[order].astype(np.float64).tolist(), sorted_heights, slots[order].tolist(), strict=False
        )
