"""What a policy sees of a pool, and what it decides: pages as columns, and which of them go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from store_client.embedded.names import U8, U32, U64, Slots
from store_client.embedded.policies.hints import Hints

Rank: TypeAlias = Callable[[Slots], npt.NDArray[Any]]
"""A number for each of these pages; the lowest goes first."""


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
    """The ends of the chains, and how they move up as pages go: the pages that may go without leaving a descendant."""

    def __init__(self, pages: Candidates, used_before_ns: int) -> None:
        self._pages, self._used_before_ns = pages, used_before_ns
        live = np.flatnonzero(pages.granules)
        slots = len(pages.granules)
        parents = pages.parent[live]
        linked = parents < slots
        children, parents = live[linked], parents[linked]
        # A link may be stale, its parent gone and the slot another page's: depths keep links from going round.
        right = pages.depth[parents] < pages.depth[children]
        self._children = np.bincount(parents[right], minlength=slots)
        ends = live[self._children[live] == 0]
        self.live = live
        self.ends: Slots = ends[pages.access[ends] < used_before_ns]
        """The pages that may go at once."""

    def take(self, slot: int) -> int:
        """This page goes; the page before it where that is an end now and may go too, else -1."""
        pages = self._pages
        parent = int(pages.parent[slot])
        if parent >= len(pages.granules) or pages.depth[parent] >= pages.depth[slot] or not pages.granules[parent]:
            return -1
        left = self._children[parent] - 1
        self._children[parent] = left
        return -1 if left or pages.access[parent] >= self._used_before_ns else parent

    def before(self, slot: int) -> int:
        """The page before this one in its chain, or -1."""
        pages = self._pages
        parent = int(pages.parent[slot])
        right = parent < len(pages.granules) and pages.depth[parent] < pages.depth[slot] and pages.granules[parent]
        return parent if right else -1


def lowest_first(
    pages: Candidates, granules: int, count: int, used_before_ns: int, rank: Rank, kind: npt.NDArray[Any]
) -> Slots:
    """Victims in the order of `rank`, as far as descendants allow. See `Policy.victims`.

    Pages of one last use and one `kind` (a column) rank alike: of a chain they go together, without a further look.
    """
    frontier = Frontier(pages, used_before_ns)
    ends = frontier.ends
    if not len(ends):
        return ends
    ranks = rank(ends)
    mean = max(1.0, float(pages.granules[frontier.live].mean()))
    wanted = max(count, int(1.25 * granules / mean) + 8)
    waiting = ends[:0]
    if wanted < len(ends):  # each end is a page at least
        split = np.argpartition(ranks, wanted)
        waiting, ends, ranks = ends[split[wanted:]], ends[split[:wanted]], ranks[split[:wanted]]
    queue = _sorted(pages, ends, ranks)
    risen: list[tuple[float, int, int]] = []
    going: list[int] = []
    freed = at = 0
    while freed < granules or len(going) < count:
        if at == len(queue) and len(waiting):
            queue, at = _sorted(pages, waiting, rank(waiting)), 0
            waiting = waiting[:0]
        if risen and (at == len(queue) or risen[0] < queue[at]):
            slot = heappop(risen)[2]
        elif at < len(queue):
            slot = queue[at][2]
            at += 1
        else:
            break
        while True:
            going.append(slot)
            freed += int(pages.granules[slot])
            before = frontier.take(slot)
            if before < 0:
                break
            if pages.access[before] != pages.access[slot] or kind[before] != kind[slot]:
                heappush(risen, (float(rank(np.array([before]))[0]), -int(pages.depth[before]), before))
                break
            if freed >= granules and len(going) >= count:
                break
            slot = before
    return np.array(going, dtype=np.int64)


def _sorted(pages: Candidates, slots: Slots, ranks: npt.NDArray[Any]) -> list[tuple[float, int, int]]:
    """(rank, height, slot) of each page: the lowest first, and of those that rank alike the deepest."""
    heights = -pages.depth[slots].astype(np.int64)
    order = np.lexsort((heights, ranks))
    sorted_ranks = ranks[order].astype(np.float64).tolist()
    return list(zip(sorted_ranks, heights[order].tolist(), slots[order].tolist(), strict=True))
