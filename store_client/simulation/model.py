"""A pool without bytes: the page table's columns, its free space and its eviction policy, and nothing else.

It does with a request what engines and the embedded store do: look the prompt up, read what is there, store the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from store_client.embedded.allocator import FreeRuns, as_runs
from store_client.embedded.arena import GRANULE
from store_client.embedded.folder import pages_for
from store_client.embedded.names import U8, U32, U64
from store_client.embedded.policies import POLICIES, Arrivals, Candidates, Hints
from store_client.embedded.putting import put_batch
from store_client.embedded.row import INLINE_EXTENTS, NONE
from store_client.embedded.table import MOST_USES, USES_APART_NS

_TRIES = 3


class ModelPool:
    """A pool of `capacity_nbytes` that evicts by `policy`, for pages of one size, of which there are `num_pages`."""

    def __init__(self, policy: str, capacity_nbytes: int, page_nbytes: int, num_pages: int) -> None:
        self._granules = capacity_nbytes // GRANULE
        self._page_granules = -(-page_nbytes // GRANULE)
        max_pages = pages_for(capacity_nbytes)
        slots = max(1, min(max_pages, self._granules // self._page_granules, num_pages))
        self._access: U64 = np.zeros(slots, dtype=np.uint64)
        self._uses: U8 = np.zeros(slots, dtype=np.uint8)
        self._parent: U32 = np.full(slots, NONE, dtype=np.uint32)
        self._depth: U32 = np.zeros(slots, dtype=np.uint32)
        self._held: U32 = np.zeros(slots, dtype=np.uint32)
        self._print: U64 = np.zeros(slots, dtype=np.uint64)
        self._first: U32 = np.zeros(slots, dtype=np.uint32)
        self._slots: dict[int, int] = {}
        self._space = FreeRuns(as_runs([(0, self._granules)]))
        self._places = FreeRuns(as_runs([(0, slots)]))
        self._policy = POLICIES[policy](Hints(None, slots, max_pages))
        self._batch = put_batch(page_nbytes)
        self.evicted = 0

    def request(self, now_ns: int, pages: Sequence[int]) -> int:
        """A prompt of pages whose names have these hashes, in order. Returns how many leading ones were there."""
        there: list[int] = []
        for page in pages:
            slot = self._slots.get(page)
            if slot is None:
                break
            there.append(slot)
        if there:
            self._use(np.array(there), now_ns)
        before = there[-1] if there else NONE
        new = pages[len(there) :]
        for at in range(0, len(new), self._batch):
            before = self._put(now_ns, new[at : at + self._batch], before)
            if before == NONE:
                break
        return len(there)

    def _use(self, slots: np.ndarray, now_ns: int) -> None:
        again = now_ns - self._access[slots].astype(np.int64) > USES_APART_NS
        self._uses[slots] = np.minimum(self._uses[slots] + again, MOST_USES)
        self._access[slots] = now_ns

    def _put(self, now_ns: int, pages: Sequence[int], before: int) -> int:
        """Store pages that follow the one at slot `before`; returns the slot of the last, or NONE if not all fit."""
        absent = [page for page in pages if page not in self._slots]
        if len(absent) < len(pages):
            self._use(np.array([self._slots[page] for page in pages if page in self._slots]), now_ns)
        chain, slot = [], before
        while slot < len(self._parent) and self._held[slot]:
            chain.append(slot)
            slot = int(self._parent[slot])
        self._access[chain] = now_ns
        for _ in range(_TRIES):
            short = len(absent) * self._page_granules - self._space.total
            short += len(absent) if len(self._space) > INLINE_EXTENTS else 0
            slots_short = len(absent) - self._places.total
            if (short <= 0 and slots_short <= 0) or not self._evict(now_ns, short, slots_short):
                break
        firsts = self._space.take_whole(min(len(absent), self._places.total), self._page_granules)
        slots = self._places.take_whole(len(firsts), 1)
        self._publish(now_ns, dict(zip(absent, zip(slots, firsts, strict=True), strict=False)), pages, before)
        return self._slots[pages[-1]] if len(slots) == len(absent) else NONE

    def _publish(self, now_ns: int, places: dict[int, tuple[int, int]], pages: Sequence[int], before: int) -> None:
        slots, parents, prints = [], [], []
        for page in pages:
            if page in places:
                slot, self._first[slot] = places[page]
                self._slots[page] = slot
                self._parent[slot] = before
                self._depth[slot] = int(self._depth[before]) + 1 if before < len(self._depth) else 0
                slots.append(slot)
                parents.append(before)
                prints.append(page)
            before = self._slots.get(page, NONE)
        if not slots:
            return
        at, uppers = np.array(slots), np.array(parents, dtype=np.uint32)
        self._access[at], self._uses[at], self._held[at] = now_ns, 0, self._page_granules
        self._print[at] = prints
        linked = uppers < len(self._uses)
        uses: U8 = np.where(linked, self._uses[np.where(linked, uppers, 0).astype(np.int64)], 0).astype(np.uint8)
        self._policy.stored(Arrivals(at, self._print[at], uppers, uses, len(self._slots)), now_ns)

    def _evict(self, now_ns: int, granules: int, slots: int) -> int:
        at_least = max(granules, self._granules // 100)
        columns = self._access, self._uses, self._parent, self._depth, self._held
        pages = Candidates(*columns, len(self._slots))
        victims = self._policy.victims(pages, at_least, max(slots, 1), now_ns, now_ns)
        self._policy.evicted(victims, self._print[victims])
        for page in self._print[victims].tolist():
            del self._slots[page]
        self._held[victims] = 0
        self._space.add(as_runs((first, self._page_granules) for first in self._first[victims].tolist()))
        self._places.add(as_runs((slot, 1) for slot in victims.tolist()))
        self.evicted += len(victims)
        return len(victims)
