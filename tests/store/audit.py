"""Does the space of a pool add up? For tests: it looks below the public interface."""

import time

import numpy as np
from store.pools import inside

from store_client import EmbeddedStore
from store_client.embedded.row import Row


def audit(store: EmbeddedStore, *, idle: bool = True) -> None:
    """Every secured granule is free, or a live page's, or reserved: exactly once. The same for every slot.

    `idle`: nobody else writes, so that nothing may be reserved.
    """
    pool = inside(store)
    writer = pool.writer
    with writer.locked(time.monotonic() + 60):
        writer._reclaim()
        with writer._ledger.peek() as draft:
            granules = np.zeros(draft.high_water, dtype=np.int64)
            slots = np.zeros(pool.table.max_pages, dtype=np.int64)
            for first, size in draft.free.runs().tolist():
                granules[first : first + size] += 1
            for first, size in draft.slots.runs().tolist():
                slots[first : first + size] += 1
            held = draft.reservations()
            assert not (idle and held)
            for reservation in held:
                for first, size in reservation.space_runs.tolist():
                    granules[first : first + size] += 1  # what a shrink cut off lies beyond
                for first, size in reservation.slot_runs.tolist():
                    slots[first : first + size] += 1
            used = 0
            live = pool.table.live_slots().tolist()
            for slot in live:
                row = Row.decode(pool.table.rows[slot].tobytes())
                assert row is not None
                extents = draft.peek_extents(slot).tolist() if row.is_listed else list(row.extents)
                slots[slot] += 1
                for first, size in extents:
                    granules[first : first + size] += 1
                    used += size
                assert pool.table.slots(np.frombuffer(row.key, np.uint8).reshape(1, 32), row.space) == [slot]
            assert (granules == 1).all(), f"{(granules == 0).sum()} granules lost, {(granules > 1).sum()} used twice"
            assert (slots == 1).all(), f"{(slots == 0).sum()} slots lost, {(slots > 1).sum()} used twice"
            assert pool.table.used_granules == used
            assert pool.table.pages == len(live)
            assert pool.table.used_granules <= draft.high_water <= draft.capacity
