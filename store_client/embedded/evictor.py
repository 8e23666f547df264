"""What goes, and how: the pool's policy names pages, and the evictor forgets them.

A policy sees arrays, not the store. The evictor takes the pages' names away and frees their space, for the holder of
the write lock.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mooncake_connector.metrics.registry import AGES_S
from store_client.embedded.allocator import Piece, as_runs, clip_runs
from store_client.embedded.evicted import Evicted
from store_client.embedded.ledger import Draft, Ledger
from store_client.embedded.names import U32, U64, Slots
from store_client.embedded.policies import POLICIES, Arrivals, Candidates, Hints, Policy, policy_name, policy_number
from store_client.embedded.row import Row
from store_client.embedded.table import AGES, Table, now_ns
from store_client.fate import Lost

FORGET_BATCH = 4096


class Evictor:
    """Forgets chosen pages, or those that the pool's policy chooses. `hints` None: there is room for none."""

    def __init__(self, table: Table, ledger: Ledger, hints: Hints | None, evicted: Evicted) -> None:
        self._table, self._ledger, self._hints, self._evicted = table, ledger, hints, evicted
        self._policies: dict[str, Policy] = {}

    @property
    def policy_name(self) -> str:
        """Of the policy that goes: the one that the pool names, as far as it needs no hints where there are none."""
        return policy_name(self._table.eviction if self._hints is not None else 0)

    def choose_policy(self, name: str) -> None:
        """Name the pool's policy, for all its processes."""
        self._table.set_eviction(policy_number(name))

    def _policy(self) -> Policy:
        name = self.policy_name
        if name not in self._policies:
            hints = self._hints if self._hints is not None else Hints(None, 0)
            self._policies = {name: POLICIES[name](hints)}
        return self._policies[name]

    def stored(self, slots: Slots, prints: U64) -> None:
        """Tell the policy of pages just stored, in the order of their chains; `prints` are hashes of their names."""
        if not len(slots):
            return
        table = self._table
        parents = table.parent[slots]
        linked = np.where(parents < table.max_pages, parents, 0).astype(np.int64)
        uses = np.where(parents < table.max_pages, table.uses(table.access[linked]), 0).astype(np.uint8)
        self._policy().stored(Arrivals(slots, prints, parents, uses, table.pages), now_ns())

    def evict(self, granules: int, slots: int, started_ns: int) -> int:
        """Evict what is needed and at least 1% of what the pool holds, so that the cost of choosing is shared by many
        puts. Of its capacity that would be all of it where there is room for a hundredth."""
        table, policy = self._table, self._policy()
        at_least = max(granules, min(table.capacity_granules, table.used_granules) // 100)
        end = table.end_of_slots()
        access = table.access[:end].copy()
        uses, used = table.uses(access), table.used_at(access)
        # A time that lies ahead (see `now_ns`) must neither spare a page for ever nor be worth less than an old one.
        ahead = used > now_ns()
        if ahead.any():
            used[ahead] = max(0, started_ns - 1)
        columns = table.parent[:end], table.depth[:end], table.granules[:end]
        pages = Candidates(used, uses.copy(), *columns, table.pages)
        victims = policy.victims(pages, at_least, max(slots, 1), started_ns, now_ns())
        policy.evicted(victims, table.hashes_of(victims))
        spent = np.flatnonzero(pages.uses != uses)
        table.set_uses(spent, pages.uses[spent])
        unused_s = (now_ns() - used[victims].astype(np.int64)) / 1e9
        evicted = self.forget(victims, Lost.PRESSURE)
        table.add_counters({"evicted_pages": evicted, **_by_age(unused_s)})
        return evicted

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


def _by_age(unused_s: npt.NDArray[np.float64]) -> dict[str, int]:
    """`AGES` of evicted pages."""
    within = np.bincount(np.searchsorted(AGES_S, unused_s), minlength=len(AGES_S) + 1)
    return dict(zip(AGES, (*within.tolist(), round(float(unused_s.sum()))), strict=True))
