"""What a policy sees of a pool, and what it decides: pages as columns, and which of them go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from heapq import heappop, heappush
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


_NO_DEPTH = np.uint32(0xFFFFFFFF)
"""Of a page that there is not: no page is deeper."""


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


class Frontier:
    """The ends of the chains, and how they move up as pages go: the pages that may go without leaving a descendant.

    Single values are read through memoryviews, in a third of the time that an array takes.
    """

    def __init__(self, pages: Candidates, used_before_ns: int) -> None:
        num_slots = len(pages.granules)
        self.there: npt.NDArray[np.bool_] = pages.granules != 0
        parents = np.minimum(pages.parent, num_slots).astype(np.intp)
        # A link may be stale, its parent gone and the slot another page's: depths keep links from going round.
        depth = np.append(pages.depth, _NO_DEPTH)
        cut = ~self.there
        np.putmask(depth[:num_slots], cut, _NO_DEPTH)
        cut |= depth.take(parents) >= pages.depth
        np.putmask(parents, cut, num_slots)
        num_children = np.bincount(parents, minlength=num_slots + 1)
        ends = np.flatnonzero((num_children[:num_slots] == 0) & self.there)
        self.ends: Slots = ends[pages.access[ends] < used_before_ns]
        """The pages that may go at once."""
        self.mean_granules = max(1.0, int(pages.granules.sum(dtype=np.int64)) / max(1, pages.count))
        self.granules, self.access = pages.granules.data, pages.access.data
        self.parents = parents.data
        """Slot of the page before each in its chain; `num_slots` where there is none."""
        self.children = num_children.data
        self.num_slots, self._used_before_ns = num_slots, used_before_ns

    def take(self, slot: int) -> int:
        """This page goes; the page before it where that is an end now and may go too, else -1."""
        parent = self.parents[slot]
        if parent == self.num_slots:
            return -1
        left = self.children[parent] - 1
        self.children[parent] = left
        return -1 if left or self.access[parent] >= self._used_before_ns else parent


def lowest_first(
    pages: Candidates, granules: int, count: int, used_before_ns: int, rank: Rank, kind: U8 | None = None
) -> Slots:
    """Victims in the order of `rank`, as far as descendants allow. See `Policy.victims`.

    Pages of one last use and one `kind` (a column) rank alike: of a chain they go together, without a further look.
    """
    frontier = Frontier(pages, used_before_ns)
    ends = frontier.ends
    if not len(ends):
        return ends
    num_slots, sizes, access, depth = frontier.num_slots, frontier.granules, frontier.access, pages.depth.data
    parents, children = frontier.parents, frontier.children
    kinds = (np.zeros(num_slots, dtype=np.uint8) if kind is None else kind).data
    queue, waiting = _first(pages, ends, rank, max(count, int(1.25 * granules / frontier.mean_granules) + 8))
    risen: list[tuple[float, int, int]] = []
    going: list[int] = []
    freed = at = 0
    while freed < granules or len(going) < count:
        if at == len(queue) and len(waiting):
            queue, at = _sorted(pages, waiting, rank.all(waiting)), 0
            waiting = waiting[:0]
        if risen and (at == len(queue) or risen[0] < queue[at]):
            slot = heappop(risen)[2]
        elif at < len(queue):
            slot = queue[at][2]
            at += 1
        else:
            break
        used, own = access[slot], kinds[slot]
        while True:  # as `Frontier.take`, of which a call takes as long as the rest
            going.append(slot)
            freed += sizes[slot]
            slot = parents[slot]
            if slot == num_slots:
                break
            left = children[slot] - 1
            children[slot] = left
            if left:
                break
            before, kind_before = access[slot], kinds[slot]
            if before >= used_before_ns:
                break
            if before != used or kind_before != own:
                heappush(risen, (rank.one(slot), -depth[slot], slot))
                break
            if freed >= granules and len(going) >= count:
                break
    return np.array(going, dtype=np.int64)


def _first(
    pages: Candidates, ends: Slots, rank: Rank, wanted: int
) -> tuple[list[tuple[float, int, int]], Slots]:  # each end is a page at least
    """The `wanted` ends that go first, sorted (see `_sorted`), and the others as they are."""
    ranks = rank.all(ends)
    if wanted >= len(ends):
        return _sorted(pages, ends, ranks), ends[:0]
    split = np.argpartition(ranks, wanted)
    first = split[:wanted]
    return _sorted(pages, ends[first], ranks[first]), ends[split[wanted:]]


def _sorted(pages: Candidates, slots: Slots, ranks: npt.NDArray[Any]) -> list[tuple[float, int, int]]:
    """(rank, height, slot) of each page: the lowest first, and of those that rank alike the deepest."""
    heights = -pages.depth[slots].astype(np.int64)
    order = np.lexsort((heights, ranks))
    sorted_ranks = ranks[order].astype(np.float64).tolist()
    return list(zip(sorted_ranks, heights[order].tolist(), slots[order].tolist(), strict=True))
