"""What goes, and how: a policy ranks pages, and the evictor forgets them.

A policy sees arrays, not the store. The evictor takes the pages' names away and frees their space, for the holder of
the write lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_connector.metrics.registry import AGES_S
from store_client.embedded.allocator import Piece, as_runs, clip_runs
from store_client.embedded.evicted import Evicted
from store_client.embedded.ledger import Draft, Ledger
from store_client.embedded.names import U32, U64, Slots
from store_client.embedded.table import AGES, NONE, Row, Table, now_ns
from store_client.fate import Lost

FORGET_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Candidates:
    """All pages of a pool, as columns over the slots of its table. Slots without a page have `granules` 0."""

    access: U64
    """`table.now_ns()` of the last use; never ahead of now."""
    parent: U32
    """Slot of the page before it in its chain, or NONE."""
    depth: U32
    """Greater than the parent's."""
    granules: U32


class Policy(ABC):
    @abstractmethod
    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int) -> Slots:
        """Slots to evict, in order, that together free `granules` and number `count`, or all that may go.

        No page comes before one of its descendants, and none that was used, itself or through a descendant, at or
        after `used_before_ns` comes at all.
        """


class Lru(Policy):
    """Least recently used first. A page counts as used when any of its descendants is."""

    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int) -> Slots:
        live = np.flatnonzero(pages.granules)
        used = effective_access(pages, live)[live]
        allowed = used < used_before_ns
        live, used = live[allowed], used[allowed]
        if not len(live):
            return live
        mean = max(1.0, float(pages.granules[live].mean()))
        wanted = max(count, int(1.25 * granules / mean) + 8)
        while True:
            oldest = live
            age = used
            if wanted < len(live):
                threshold = np.partition(used, wanted)[wanted]
                near = used <= threshold
                oldest, age = live[near], used[near]
            order = oldest[np.lexsort((-pages.depth[oldest].astype(np.int64), age))]
            reach = np.cumsum(pages.granules[order].astype(np.int64))
            if reach[-1] >= granules or len(order) == len(live):
                enough = max(int(np.searchsorted(reach, granules)) + 1, count)
                return order[:enough]
            wanted *= 2


def effective_access(pages: Candidates, live: Slots) -> U64:
    """The latest use of each page or of any of its descendants.

    Follows the chains upwards from the pages whose use is later than their parent's. A link may be stale (its parent
    was forgotten and the slot holds another page): it only makes that page look younger, and the loop still ends,
    because every round raises a value.
    """
    used = pages.access.copy()
    children = live[pages.parent[live] < NONE]
    children = children[pages.parent[children] < len(used)]
    while len(children):
        parents = pages.parent[children].astype(np.int64)
        later = (used[children] > used[parents]) & (pages.granules[parents] > 0)
        children, parents = children[later], parents[later]
        np.maximum.at(used, parents, used[children])
        children = np.unique(parents)
        children = children[pages.parent[children] < len(used)]
    return used


POLICIES: dict[str, type[Policy]] = {"lru": Lru}


class Evictor:
    """Forgets chosen pages, or those that the policy chooses."""

    def __init__(self, table: Table, ledger: Ledger, policy: Policy, evicted: Evicted) -> None:
        self._table, self._ledger, self._policy, self._evicted = table, ledger, policy, evicted

    def forget(self, slots: Slots, cause: Lost) -> int:
        """One transaction for each FORGET_BATCH of slots: their space is free and their names are gone."""
        forgotten = 0
        for at in range(0, len(slots), FORGET_BATCH):
            with self._ledger.transaction() as draft:
                batch: U32 = slots[at : at + FORGET_BATCH].astype(np.uint32)
                pieces, gone = self._pieces(draft, batch)
                self.free(draft, pieces, gone.tolist())
                granules = sum(size for _, size in pieces)
                hashes = self._table.hashes_of(gone)
                self._evicted.note(hashes, cause, self._table.access[gone])  # before: nobody asks why a page is there
                cells = self._table.cells.cell_of(hashes, gone)
                self._ledger.record(draft, -len(gone), -granules, clear_cells=cells, clear_slots=gone)
            forgotten += len(gone)
        return forgotten

    def _pieces(self, draft: Draft, slots: U32) -> tuple[list[Piece], U32]:
        """The arena space of the pages at `slots`, and which of the slots hold a page at all."""
        pieces: list[Piece] = []
        gone = []
        for slot in slots.tolist():
            row = Row.decode(self._table.rows[slot].tobytes())
            if row is None:
                self._table.check([slot])
                continue
            gone.append(slot)
            if row.is_listed:
                pieces.extend((int(first), int(size)) for first, size in draft.pop_extents(slot))
            else:
                pieces.extend(row.extents)
        return pieces, np.array(gone, dtype=np.uint32)

    def free(self, draft: Draft, pieces: Sequence[Piece], slots: Sequence[int]) -> None:
        """Give space and slots back; what a shrink has cut off meanwhile is not free but gone."""
        below, _beyond = clip_runs(as_runs(pieces), draft.high_water)
        draft.free.add(below)
        draft.slots.add(as_runs((slot, 1) for slot in slots))

    def evict(self, granules: int, slots: int, started_ns: int) -> int:
        """Evict what is needed and at least 1% of the pool, so that the cost of choosing is shared by many puts."""
        table = self._table
        at_least = max(granules, table.capacity_granules // 100)
        used = table.access.copy()
        # A time that lies ahead (see `now_ns`) must neither spare a page for ever nor be worth less than an old one.
        used[used > now_ns()] = max(0, started_ns - 1)
        pages = Candidates(used, table.parent, table.depth, table.granules)
        victims = self._policy.victims(pages, at_least, max(slots, 1), started_ns)
        unused_s = (now_ns() - used[victims].astype(np.int64)) / 1e9
        evicted = self.forget(victims, Lost.PRESSURE)
        table.add_counters({"evicted_pages": evicted, **_by_age(unused_s)})
        return evicted


def _by_age(unused_s: npt.NDArray[np.float64]) -> dict[str, int]:
    """`AGES` of evicted pages."""
    within = np.bincount(np.searchsorted(AGES_S, unused_s), minlength=len(AGES_S) + 1)
    return dict(zip(AGES, (*within.tolist(), round(float(unused_s.sum()))), strict=True))
