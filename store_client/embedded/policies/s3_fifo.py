"""S3-FIFO (Yang et al., SOSP 2023) on chains: a small queue for what is new, a main one for what was used again."""

from heapq import heappop, heappush

import numpy as np

from store_client.embedded.names import U64, Slots
from store_client.embedded.policies.base import Arrivals, Candidates, Ends, Frontier, Policy
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

_Place = tuple[float, int, int]


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
        new = hints.queue[ends] == _SMALL
        now = number = hints.next_number(_QUEUED, 0)
        places = (hints.entered[ends].astype(np.int64) - now + _HALF) & 0xFFFFFFFF
        none, batch = np.zeros(len(ends), dtype=np.uint8), frontier.likely(granules, count)
        queues = [_Queue(Ends(ends[its], places[its], none[its], batch)) for its in (new, ~new)]
        uses, sizes = pages.uses.data, frontier.granules
        queue_of, entered = hints.queue.data, hints.entered.data

        def place_of(slot: int) -> _Place:
            return (entered[slot] - now + _HALF) & 0xFFFFFFFF, 0, slot

        going: list[int] = []
        freed = 0
        while freed < granules or len(going) < count:
            others = bool(queues[_MAIN])
            if queues[_SMALL] and (small > share or not others):
                mine, least = _SMALL, share if others else -1
            elif others:
                mine, least = _MAIN, -1
            else:
                break
            slot, following = queues[mine].pop(), queues[mine].first()
            while not uses[slot]:
                small -= mine == _SMALL
                going.append(slot)
                freed += sizes[slot]
                if (slot := frontier.take(slot)) < 0:
                    break
                place, its = place_of(slot), _SMALL if queue_of[slot] == _SMALL else _MAIN
                is_next = its == mine and (mine == _MAIN or small > least) and (following is None or place < following)
                if not is_next or (freed >= granules and len(going) >= count):
                    queues[its].add(place)
                    break
            else:
                if mine == _SMALL:
                    moved = self._promote(pages, frontier, slot, number)
                    number, small = number + moved, small - moved
                else:
                    uses[slot] = min(uses[slot], _MOST_CHANCES) - 1
                    entered[slot] = number & 0xFFFFFFFF
                    number += 1
                queues[_MAIN].add(place_of(slot))
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
    """Ends of chains as (place, 0, slot), first the one that queued first."""

    def __init__(self, ends: Ends) -> None:
        self._ends, self._first = ends, ends.next()
        self._added: list[_Place] = []

    def __bool__(self) -> bool:
        return self._first is not None or bool(self._added)

    def add(self, place: _Place) -> None:
        heappush(self._added, place)

    def first(self) -> _Place | None:
        if self._added and (self._first is None or self._added[0] < self._first):
            return self._added[0]
        return self._first

    def pop(self) -> int:
        """The first; there is one."""
        if self._first is None or (self._added and self._added[0] < self._first):
            return heappop(self._added)[2]
        slot = self._first[2]
        self._first = self._ends.next()
        return slot
