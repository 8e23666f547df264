"""S3-FIFO (Yang et al., SOSP 2023) on chains: a small queue for what is new, a main one for what was used again."""

from collections import deque
from heapq import heappop, heappush

import numpy as np

from store_client.embedded.names import U8, U64, Slots
from store_client.embedded.policies.base import Arrivals, Candidates, Ends, Frontier, Policy
from store_client.embedded.policies.ghosts import Ghosts
from store_client.embedded.policies.hints import Hints

_SMALL, _MAIN, _STAYS = 0, 1, 2
_SHARE = 0.1
"""Of the pool's pages, for the small queue."""
_QUEUED = 2
"""Word of the header: pages queued so far."""
_MOST_CHANCES = 3
_HALF = 1 << 31
"""A page that queued so many pages before the last one comes first: numbers run round after four billion pages."""
_NOWHERE = 1 << 32
"""Beyond all places."""


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
        is_main = hints.queue[: len(pages.uses)] != _SMALL
        small_pages = int(np.count_nonzero(frontier.there)) - int(np.count_nonzero(is_main & frontier.there))
        share = int(_SHARE * pages.count)
        now = number = hints.next_number(_QUEUED, 0)
        places = (hints.entered[ends].astype(np.int64) - now + _HALF) & 0xFFFFFFFF
        none, batch = np.zeros(len(ends), dtype=np.uint8), frontier.likely(granules, count)
        of_main = is_main[ends]
        small, main = (_Queue(Ends(ends[its], places[its], none[its], batch)) for its in (~of_main, of_main))
        uses, entered, sizes = pages.uses.data, hints.entered.data, frontier.granules
        parents, children, access = frontier.parents, frontier.children, frontier.access
        states = np.full(len(is_main) + 1, _MAIN, dtype=np.uint8)
        stays = np.greater_equal(pages.access, used_before_ns, out=states[:-1].view(np.bool_))
        stays |= pages.uses != 0
        states[:-1] *= np.uint8(_STAYS)
        states[:-1] |= is_main
        state = states.data  # of each page: its queue, and whether something keeps it from going with what is after it
        moved = _Moved(pages.uses, hints)
        going: list[int] = []
        go, freed = going.append, 0
        while freed < granules or len(going) < count:
            if small.place != _NOWHERE and (small_pages > share or main.place == _NOWHERE):
                mine, queue = _SMALL, small
                most = small_pages - share if main.place != _NOWHERE else frontier.num_slots
            elif main.place != _NOWHERE:
                mine, queue, most = _MAIN, main, frontier.num_slots
                if main.is_last:
                    moved.note()  # it may be one of them
            else:
                break
            slot = queue.pop()
            if uses[slot]:
                if mine == _SMALL:  # and what is before it moves along, as far as it is in the small queue, too
                    main.add_last(_place(number, now), slot)
                    before = number
                    while not state[slot] & _MAIN:
                        state[slot] = _MAIN | _STAYS
                        moved.slots.append(slot)
                        slot = parents[slot]
                        number += 1
                    moved.numbers += range(before, number)
                    small_pages -= number - before
                else:
                    uses[slot] = min(uses[slot], _MOST_CHANCES) - 1
                    entered[slot] = number & 0xFFFFFFFF
                    main.add_last(_place(number, now), slot)
                    number += 1
                continue
            queued, before = entered[slot], len(going)
            following = queue.place
            for _ in range(most):
                go(slot)
                freed += sizes[slot]
                slot = parents[slot]
                if children[slot] != 1 or state[slot] != mine or (freed >= granules and len(going) >= count):
                    break
                child, queued = queued, entered[slot]
                if queued > child and _place(queued, now) >= following:  # as a rule a page queued before its children
                    break
            if mine == _SMALL:
                small_pages -= len(going) - before
            if (left := children[slot]) != 1:  # also where there is none before it
                children[slot] = left - 1
            elif access[slot] < used_before_ns:
                (main if state[slot] & _MAIN else small).add(_place(entered[slot], now), slot)
        moved.note()
        hints.next_number(_QUEUED, number - now)
        return np.array(going, dtype=np.int64)

    def evicted(self, slots: Slots, prints: U64) -> None:
        new = self.hints.queue[slots] == _SMALL
        self._ghosts.add(prints[new], self.hints.turn[slots[new]])


def _place(number: int, now: int) -> int:
    """Of what queued with this number: lower for what came before."""
    return (number - now + _HALF) & 0xFFFFFFFF


class _Moved:
    """Pages that move to the main queue, and the places that they take there: noted together, which is sooner done."""

    def __init__(self, uses: U8, hints: Hints) -> None:
        self._uses, self._hints = uses, hints
        self.slots: list[int] = []
        self.numbers: list[int] = []

    def note(self) -> None:
        if self.slots:
            at = np.array(self.slots)
            self._hints.queue[at], self._uses[at] = _MAIN, 0
            self._hints.entered[at] = (np.array(self.numbers) & 0xFFFFFFFF).astype(np.uint32)
            self.slots, self.numbers = [], []


class _Queue:
    """Ends of chains by their places, first the one that queued first."""

    def __init__(self, ends: Ends) -> None:
        self._ends, self._first = ends, ends.next()
        self._added: list[tuple[int, int]] = []
        self._last: deque[tuple[int, int]] = deque()
        self._look()

    def _look(self) -> None:
        place = _NOWHERE if self._first is None else self._first[0]
        if self._added and self._added[0][0] < place:
            place = self._added[0][0]
        self.is_last = place == _NOWHERE and bool(self._last)
        """Whether the first is one of those that queued in the meantime."""
        self.place = self._last[0][0] if self.is_last else place
        """Of the first."""

    def add(self, place: int, slot: int) -> None:
        heappush(self._added, (place, slot))
        if place < self.place:
            self.place, self.is_last = place, False

    def add_last(self, place: int, slot: int) -> None:
        """One that queues after all others."""
        self._last.append((place, slot))
        if self.place == _NOWHERE:
            self.place, self.is_last = place, True

    def pop(self) -> int:
        """The first; there is one."""
        if self.is_last:
            slot = self._last.popleft()[1]
        elif self._first is not None and self._first[0] == self.place:
            slot = self._first[2]
            self._first = self._ends.next()
        else:
            slot = heappop(self._added)[1]
        self._look()
        return slot
