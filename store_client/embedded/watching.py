"""Which chains of pages were used since the last look: for whoever records a pool's traffic. Takes no lock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from store_client.embedded.names import Slots
from store_client.embedded.pool import Pool
from store_client.embedded.table import now_ns


@dataclass(frozen=True, slots=True)
class UsedChain:
    """A page that was read or stored, and those before it in its chain."""

    used_ns: int
    """`table.now_ns()` of the use."""
    pages: tuple[int, ...]
    """Hashes of their names, the first of the chain first."""
    uses: tuple[int, ...]
    """How often each was used since it was stored, up to a limit: what only hangs on a use is not counted."""


class Watch:
    """Follows the pages of one space of a pool: an identity (`names.identify`). One call of `take` at a time."""

    def __init__(self, space: int) -> None:
        self._space = space
        self._pool: object = None
        self._since_ns = 0

    def take(self, pool: Pool) -> list[UsedChain]:
        """The chains used since the last call, in the order of their use; none at the first call, and of another pool.

        Two requests that go equally far along one chain between two calls are one. A use whose time lies ahead (see
        `table.now_ns`) is told when that comes: it must not hide all that are noted until then.
        """
        table = pool.table
        slots = table.live_slots()
        slots = slots[table.space[slots] == self._space]
        used = table.last_uses[slots]
        came = used <= now_ns()
        slots, used = slots[came], used[came]
        known, since = self._pool == pool.data, self._since_ns
        self._pool, self._since_ns = pool.data, max(since if known else 0, int(used.max(initial=0)))
        if not known:
            return []
        fresh = used > since
        slots, used = slots[fresh], used[fresh]
        ends = np.setdiff1d(slots, table.parent[slots].astype(np.int64))
        when = dict(zip(slots.tolist(), used.tolist(), strict=True))
        chains = [self._chain(pool, end, when[end]) for end in ends.tolist()]
        return sorted(chains, key=lambda chain: chain.used_ns)

    @staticmethod
    def _chain(pool: Pool, end: int, used_ns: int) -> UsedChain:
        table, slots, slot = pool.table, [], end
        while True:
            slots.append(slot)
            parent = int(table.parent[slot])
            if parent >= table.max_pages or table.depth[parent] >= table.depth[slot] or not table.granules[parent]:
                break
            slot = parent
        at: Slots = np.array(slots[::-1], dtype=np.int64)
        uses = table.uses(table.access[at])
        return UsedChain(used_ns, tuple(table.hashes_of(at).tolist()), tuple(uses.tolist()))
