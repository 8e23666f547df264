"""S3-FIFO (Yang et al., SOSP 2023) on chains: a small queue for what is new, a main one for what was used again."""

from heapq import heappop, heappush

import numpy as np

from store_client.embedded.names import U32, U64, Slots
from store_client.embedded.policies.base import Arrivals, Candidates, Frontier, Policy
from store_client.embedded.policies.ghosts import Ghosts
from store_client.embedded.policies.hints import Hints

_SMALL, _MAIN = 0, 1
_SHARE = 0.1
"""Of the pool's pages, for the small queue."""
_QUEUED = 2
"""Word of the header: pages queued so far."""
_MOST_CHANCES = 3
_HALF = 1 << 31
"""A page that queued so many pages before the last one comes first: numbers run round after four billion pages."""


class S3Fifo(Policy):
    """New pages queue apart, in a tenth of the pool; those that are used there move to the main queue, whose pages get
    another round for each use. What comes back soon after it went goes to the main queue at once.

    Only ends of chains leave; a page that moves to the main queue takes the pages before it along.
    """

    name = "s3-fifo"

    def __init__(self, hints: Hints) -> None:
        super().__init__(hints)
        self._ghosts = Ghosts(hints)

    def stored(self, new: Arrivals, now_ns: int) -> None:
        hints = self.hints
        seen, _ = self._ghosts.seen(new.prints, within=new.count)
        hints.queue[new.slots] = np.where(seen, _MAIN, _SMALL)
        first = hints.next_number(_QUEUED, len(new.slots))
        hints.entered[new.slots] = (np.arange(first, first + len(new.slots)) & 0xFFFFFFFF).astype(np.uint32)

    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int, now_ns: int) -> Slots:
        hints, frontier = self.hints, Frontier(pages, used_before_ns)
        ends = frontier.ends
        if not len(ends):
            return ends
        small = int(np.count_nonzero((hints.queue[: len(pages.uses)] == _SMALL) & frontier.there))
        share = int(_SHARE * pages.count)
        wanted = max(count, int(1.25 * granules / frontier.mean_granules) + 8)
        new = hints.queue[ends] == _SMALL
        now = number = hints.next_number(_QUEUED, 0)
        queues = [_Queue(slots, hints.entered[slots], now, wanted) for slots in (ends[new], ends[~new])]
        uses, sizes = pages.uses.data, frontier.granules
        queue_of, entered = hints.queue.data, hints.entered.data
        going: list[int] = []
        freed = 0
        while freed < granules or len(going) < count:
            if queues[_SMALL] and (small > share or not queues[_MAIN]):
                slot = queues[_SMALL].pop()
                if uses[slot]:
                    moved = self._promote(pages, frontier, slot, number)
                    number, small = number + moved, small - moved
                    queues[_MAIN].add(slot, entered[slot])
                    continue
                small -= 1
            elif queues[_MAIN]:
                slot = queues[_MAIN].pop()
                if uses[slot]:
                    uses[slot] = min(uses[slot], _MOST_CHANCES) - 1
                    entered[slot] = number & 0xFFFFFFFF
                    number += 1
                    queues[_MAIN].add(slot, entered[slot])
                    continue
            else:
                break
            going.append(slot)
            freed += sizes[slot]
            before = frontier.take(slot)
            if before >= 0:
                queues[_SMALL if queue_of[before] == _SMALL else _MAIN].add(before, entered[before])
        hints.next_number(_QUEUED, number - now)
        return np.array(going, dtype=np.int64)

    def _promote(self, pages: Candidates, frontier: Frontier, slot: int, number: int) -> int:
        """Move a page to the main queue, and what is before it, to places from `number` on; how many moved."""
        queue_of, entered, uses, moved = self.hints.queue.data, self.hints.entered.data, pages.uses.data, 0
        while slot < frontier.num_slots and queue_of[slot] == _SMALL:
            queue_of[slot], entered[slot], uses[slot] = _MAIN, (number + moved) & 0xFFFFFFFF, 0
            moved += 1
            slot = frontier.parents[slot]
        return moved

    def evicted(self, slots: Slots, prints: U64) -> None:
        new = self.hints.queue[slots] == _SMALL
        self._ghosts.add(prints[new], self.hints.turn[slots[new]])


class _Queue:
    """Ends of chains, first the one that queued first. Those of the beginning are sorted a batch at a time."""

    def __init__(self, slots: Slots, entered: U32, now: int, batch: int) -> None:
        self._now, self._batch = now, batch
        self._slots, self._places = slots, (entered.astype(np.int64) - now + _HALF) & 0xFFFFFFFF
        self._sorted: list[tuple[int, int]] = []
        """(place, slot), the first at the end."""
        self._added: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._sorted or self._added or len(self._slots))

    def add(self, slot: int, entered: int) -> None:
        heappush(self._added, ((entered - self._now + _HALF) & 0xFFFFFFFF, slot))

    def pop(self) -> int:
        """The first; there is one."""
        if not self._sorted and len(self._slots):
            self._sort()
        if not self._sorted or (self._added and self._added[0] < self._sorted[-1]):
            return heappop(self._added)[1]
        return self._sorted.pop()[1]

    def _sort(self) -> None:
        slots, places = self._slots, self._places
        if self._batch < len(slots):
            split = np.argpartition(places, self._batch)
            first, rest = split[: self._batch], split[self._batch :]
        else:
            first, rest = np.arange(len(slots)), np.arange(0)
        self._slots, self._places = slots[rest], places[rest]
        slots, places = slots[first], places[first]
        order = np.lexsort((slots, places))[::-1]
        self._sorted = list(zip(places[order].tolist(), slots[order].tolist(), strict=True))
        self._batch *= 2
