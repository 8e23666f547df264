"""S3-FIFO (Yang et al., SOSP 2023) on chains: a small queue for what is new, a main one for what was used again."""

from heapq import heapify, heappop, heappush

import numpy as np

from store_client.embedded.names import U64, Slots
from store_client.embedded.policies.base import Arrivals, Candidates, Frontier, Policy
from store_client.embedded.policies.ghosts import Ghosts
from store_client.embedded.policies.hints import Hints

_SMALL, _MAIN = 0, 1
_SHARE = 0.1
"""Of the pool's pages, for the small queue."""
_QUEUED = 2
"""Word of the header: pages queued so far."""
_MOST_CHANCES = 3


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
        live, ends = frontier.live, frontier.ends
        if not len(ends):
            return ends
        small = int(np.count_nonzero(hints.queue[live] == _SMALL))
        share = int(_SHARE * len(live))
        mean = max(1.0, float(pages.granules[live].mean()))
        wanted = 4 * (max(count, int(1.25 * granules / mean)) + 8)
        new = hints.queue[ends] == _SMALL
        now = hints.next_number(_QUEUED, 0)
        queues = [self._oldest(ends[new], now, wanted), self._oldest(ends[~new], now, wanted)]
        uses = pages.uses
        going: list[int] = []
        freed = 0
        while freed < granules or len(going) < count:
            if queues[_SMALL] and (small > share or not queues[_MAIN]):
                _, slot = heappop(queues[_SMALL])
                if uses[slot]:
                    small -= self._promote(pages, frontier, slot)
                    heappush(queues[_MAIN], (self._place(slot, now), slot))
                    continue
                small -= 1
            elif queues[_MAIN]:
                _, slot = heappop(queues[_MAIN])
                if uses[slot]:
                    uses[slot] = min(int(uses[slot]), _MOST_CHANCES) - 1
                    hints.entered[slot] = hints.next_number(_QUEUED, 1) & 0xFFFFFFFF
                    heappush(queues[_MAIN], (self._place(slot, now), slot))
                    continue
            else:
                break
            going.append(slot)
            freed += int(pages.granules[slot])
            before = frontier.take(slot)
            if before >= 0:
                heappush(queues[_SMALL if hints.queue[before] == _SMALL else _MAIN], (self._place(before, now), before))
        return np.array(going, dtype=np.int64)

    def _place(self, slot: int, now: int) -> int:
        """Least for the page that queued first; `now` pages had queued. Numbers run round after four billion pages."""
        return (int(self.hints.entered[slot]) - now + (1 << 31)) & 0xFFFFFFFF

    def _oldest(self, slots: Slots, now: int, count: int) -> list[tuple[int, int]]:
        """A heap of the `count` pages that queued first, by place."""
        places = (self.hints.entered[slots].astype(np.int64) - now + (1 << 31)) & 0xFFFFFFFF
        if count < len(slots):
            first = np.argpartition(places, count)[:count]
            slots, places = slots[first], places[first]
        heap = list(zip(places.tolist(), slots.tolist(), strict=True))
        heapify(heap)
        return heap

    def _promote(self, pages: Candidates, frontier: Frontier, slot: int) -> int:
        """Move a page to the main queue, and what is before it; how many moved."""
        hints, moved = self.hints, 0
        while slot >= 0 and hints.queue[slot] == _SMALL:
            hints.queue[slot] = _MAIN
            hints.entered[slot] = hints.next_number(_QUEUED, 1) & 0xFFFFFFFF
            pages.uses[slot] = 0
            moved += 1
            slot = frontier.before(slot)
        return moved

    def evicted(self, slots: Slots, prints: U64) -> None:
        new = self.hints.queue[slots] == _SMALL
        self._ghosts.add(prints[new], self.hints.turn[slots[new]])
