"""Forgetting pages: their names go, and their space is free. Everything here is for the holder of the write lock."""

from collections.abc import Sequence

import numpy as np

from store_client.embedded import rows as rows_
from store_client.embedded.allocator import Piece
from store_client.embedded.clock import now_ns
from store_client.embedded.extents import as_runs, clip_runs
from store_client.embedded.ledger import Draft
from store_client.embedded.policy import Candidates, Policy
from store_client.embedded.rows import U32
from store_client.embedded.table import Table
from store_client.embedded.transactions import Transactions

FORGET_BATCH = 4096


class Evictor:
    """Forgets chosen pages, or those that the policy chooses."""

    def __init__(self, table: Table, transactions: Transactions, policy: Policy) -> None:
        self._table, self._transactions, self._policy = table, transactions, policy

    def forget(self, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
        """One transaction for each FORGET_BATCH of slots: their space is free and their names are gone."""
        forgotten = 0
        for at in range(0, len(slots), FORGET_BATCH):
            with self._transactions.begin() as draft:
                batch: U32 = slots[at : at + FORGET_BATCH].astype(np.uint32)
                pieces, gone = self._pieces(draft, batch)
                self.free(draft, pieces, gone.tolist())
                granules = sum(size for _, size in pieces)
                draft.record = self._transactions.record(
                    draft, -len(gone), -granules, clear_cells=self._table.cells_of(gone), clear_slots=gone
                )
            forgotten += len(gone)
        return forgotten

    def _pieces(self, draft: Draft, slots: U32) -> tuple[list[Piece], U32]:
        """The arena space of the pages at `slots`, and which of the slots hold a page at all."""
        pieces: list[Piece] = []
        gone = []
        for slot in slots.tolist():
            row = rows_.decode(self._table.rows[slot].tobytes())
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
        # A time that lies ahead (see `clock`) must neither spare a page for ever nor be worth less than an old one.
        used[used > now_ns()] = max(0, started_ns - 1)
        pages = Candidates(used, table.parent, table.depth, table.granules)
        victims = self._policy.victims(pages, at_least, max(slots, 1), started_ns)
        evicted = self.forget(victims)
        table.add_counters({"evicted_pages": evicted})
        return evicted
