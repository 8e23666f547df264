"""Looking at all pages of a pool, without a lock: for whoever cannot know them from the feed of changes.

What is told was there a moment ago; who acts on it looks at the page first.
"""

from __future__ import annotations

import numpy as np

from store_client.base import Change
from store_client.embedded.names import U64, Slots
from store_client.embedded.pool import Pool
from store_client.embedded.table import READ, now_ns

_OVERLAP_NS = 1_000_000_000
"""Uses are noted a moment after the time that is noted."""


def pages_at(pool: Pool, start: int, count: int) -> tuple[tuple[Change, ...], int | None]:
    """The pages in `count` slots from `start` on, and where to go on; None at the end of the table."""
    stop = min(start + count, pool.table.max_pages)
    slots = start + np.flatnonzero(pool.table.granules[start:stop] != 0)
    return _told(pool, slots), stop if stop < pool.table.max_pages else None


class Reread:
    """Pages that were read since they were stored, each told once. One call of `take` at a time."""

    def __init__(self) -> None:
        self._pool: object = None
        self._since_ns = 0
        self._told: U64 = np.zeros(0, dtype=np.uint64)
        """By slot, generation of the page that was told last."""

    def take(self, pool: Pool) -> tuple[Change, ...]:
        table, now = pool.table, now_ns()
        if self._pool != pool.data:
            self._pool, self._since_ns = pool.data, 0
            self._told = np.zeros(table.max_pages, dtype=np.uint64)
        slots = table.live_slots()
        used = table.access[slots]
        slots = slots[((used & np.uint64(READ)) != 0) & (used >= self._since_ns)]
        generations = table.generations(slots)
        new = generations != self._told[slots]
        self._told[slots] = generations
        self._since_ns = max(0, now - _OVERLAP_NS)
        return _told(pool, slots[new])


def _told(pool: Pool, slots: Slots) -> tuple[Change, ...]:
    """Grouped by space and size, and within that parents before their children."""
    slots = slots[np.argsort(pool.table.depth[slots], kind="stable")]
    names = pool.spaces.all()
    groups: dict[tuple[int, int], list[bytes]] = {}
    for key, space, nbytes in pool.table.titles(slots):
        groups.setdefault((space, nbytes), []).append(key)
    return tuple(
        Change(True, names[space][0].digest, names[space][1], nbytes, tuple(keys))
        for (space, nbytes), keys in groups.items()
        if space in names
    )
