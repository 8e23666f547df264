"""Changes of ledger, page table and feed that hold together. Everything here is for the holder of the write lock.

The redo record is committed with the transaction, then applied to the page table, then told in the feed. What a writer
that was killed in between has left undone, the next one does first.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from store_client.embedded.clock import now_ns
from store_client.embedded.faults import Damaged
from store_client.embedded.feed import Feed
from store_client.embedded.journal import Record
from store_client.embedded.ledger import Draft, Ledger
from store_client.embedded.table import Table


class Transactions:
    """See the module. Changes that leave the page table alone need the ledger only."""

    def __init__(self, ledger: Ledger, table: Table, feed: Feed) -> None:
        self._ledger, self._table, self._feed = ledger, table, feed

    @contextmanager
    def begin(self) -> Iterator[Draft]:
        """A transaction of the ledger; its redo record (`Draft.record`) is committed with it and carried out after."""
        with self._ledger.transaction(self._prepare) as draft:
            yield draft
        if draft.record is not None:
            self._carry_out(draft.record)

    def _prepare(self, record: Record) -> None:
        self._feed.prepare(record.number, np.take(self._table.rows, record.clear_slots, axis=0), record.set_rows)

    def _carry_out(self, record: Record) -> None:
        self._table.apply(record, now_ns())
        self._feed.publish(record.number)

    def record(self, draft: Draft, pages: int = 0, granules: int = 0, **changes: np.ndarray) -> Record:
        """A redo record with these changes; `pages` and `granules` are what they add."""
        return Record(draft.number + 1, self._table.pages + pages, self._table.used_granules + granules, **changes)

    def catch_up(self, draft: Draft) -> None:
        """Carry out what was committed. Raises Damaged where ledger, page table and feed cannot belong together."""
        table, told = self._table, self._feed.told
        if draft.number - table.applied not in (0, 1):
            raise Damaged(f"its page table is at change {table.applied}, its ledger at {draft.number}")
        if table.pages > table.max_pages or table.used_granules > max(draft.high_water, draft.capacity):
            raise Damaged(f"it counts {table.pages} pages in {table.used_granules} granules")
        if draft.number - told not in (0, 1) or told > table.applied:
            raise Damaged(f"its feed is at change {told}, its ledger at {draft.number}")
        if draft.number != told:
            record = draft.last_record()
            if record is not None:
                self._carry_out(record)
