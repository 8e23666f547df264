"""S3-FIFO (Yang et al., SOSP 2023) on chains: a small queue for what is new, a main one for what was used again."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from store_client.embedded.names import U64, Slots
from store_client.embedded.policies.base import Arrivals, Candidates, Ends, Frontier, Policy
from store_client.embedded.policies.ghosts import Ghosts
from store_client.embedded.policies.hints import Hints

_SMALL, _MAIN = 0, 1
"""A page's queue. Beside it, while pages are chosen:"""
_ONE_USE, _USES, _APART = 0x02, 0x1E, 0x20
"""how often it was used, and whether it does not go together with what is after it: in use, or queued anew."""
_SHARE = 0.1
"""Of the pool's pages, for the small queue."""
_QUEUED = 2
"""Word of the header: pages queued so far."""
_MOST_CHANCES = 3
_NEW = 1 << 31
"""Place of the next page that queues. One that queued so many pages before comes first: numbers run round after four
billion pages."""
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
        frontier = self.frontier(pages, used_before_ns)
        if not len(frontier.ends):
            return frontier.ends
        choice = _Choice(self.hints, frontier, granules, count)
        while choice.is_short and (queue := choice.next_queue()) is not None:
            slot = queue.pop()
            if not choice.uses_of(slot):
                choice.let_go(slot, queue)
            elif queue is choice.small:
                choice.promote(slot)
            else:
                choice.queue_again(slot)
        choice.note()
        return np.array(choice.going, dtype=np.int64)

    def evicted(self, slots: Slots, prints: U64) -> None:
        new = self.hints.queue[slots] == _SMALL
        self._ghosts.add(prints[new], self.hints.turn[slots[new]])


class _Choice:
    """The two queues while pages are chosen, and the pages that go."""

    def __init__(self, hints: Hints, frontier: Frontier, granules: int, count: int) -> None:
        pages, self._hints, self._frontier = frontier.pages, hints, frontier
        self._granules, self._count, self._freed = granules, count, 0
        self.going: list[int] = []
        slots, ends, batch = frontier.num_slots, frontier.ends, frontier.likely(granules, count)
        is_main = hints.queue[:slots] != _SMALL
        self._small_pages = int(np.count_nonzero(frontier.there > is_main))
        self._share = int(_SHARE * pages.count)
        self._states = np.empty(slots + 1, dtype=np.uint8)
        self._states[slots] = _MAIN  # what is before the first page of a chain
        states = np.left_shift(pages.uses, 1, out=self._states[:slots])
        states |= is_main
        states[np.flatnonzero(pages.access >= frontier.used_before_ns)] |= np.uint8(_APART)
        self._state = self._states.data
        self._entered, self._now = hints.entered.data, hints.next_number(_QUEUED, 0)
        self._place = _NEW
        """Of the next page that queues."""
        self._queued: list[int] = []
        """Pages in the order in which they queued anew, as far as it was not noted."""
        places = hints.entered[ends] - np.uint32((self._now - _NEW) & 0xFFFFFFFF)
        of_main = is_main[ends]
        self.small, self.main = (_Queue(Ends(ends[it], places[it], None, batch)) for it in (~of_main, of_main))

    @property
    def is_short(self) -> bool:
        return self._freed < self._granules or len(self.going) < self._count

    def next_queue(self) -> _Queue | None:
        """The small queue as long as it has more than its share; None where nothing is left that may go."""
        if self.small.place != _NOWHERE and (self._small_pages > self._share or self.main.place == _NOWHERE):
            return self.small
        if self.main.place == _NOWHERE:
            return None
        if self.main.place >= _NEW:  # it may be one of them
            self.note()
        return self.main

    def _place_of(self, number: int) -> int:
        """Of what queued with this number: lower for what came before, from `_NEW` on for what queues now."""
        return (number - self._now + _NEW) & 0xFFFFFFFF

    def uses_of(self, slot: int) -> int:
        return self._state[slot] & _USES

    def promote(self, slot: int) -> None:
        """It moves to the main queue, and so does what is before it in its chain."""
        state, parents, queued = self._state, self._frontier.parents, self._queued
        self.main.add(self._place, slot)
        before = len(queued)
        while not state[slot] & _MAIN:
            state[slot] = _MAIN | _APART
            queued.append(slot)
            slot = parents[slot]
        moved = len(queued) - before
        self._place += moved
        self._small_pages -= moved

    def queue_again(self, slot: int) -> None:
        """It has another round in the main queue for each of its uses."""
        self.main.add(self._place, slot)
        self._place += 1
        self._queued.append(slot)
        self._state[slot] = _MAIN | min(self.uses_of(slot), _MOST_CHANCES * _ONE_USE) - _ONE_USE

    def let_go(self, slot: int, queue: _Queue) -> None:
        """It goes, and what is before it in its chain as far as that would go next."""
        frontier, state, entered = self._frontier, self._state, self._entered
        parents, children, sizes = frontier.parents, frontier.children, frontier.granules
        granules, count, freed, going = self._granules, self._count, self._freed, self.going
        is_small, following, before, go = queue is self.small, queue.place, len(going), going.append
        mine = _SMALL if is_small else _MAIN  # and neither used nor apart
        is_turn_limited = is_small and self.main.place != _NOWHERE
        number = entered[slot]
        for _ in range(self._small_pages - self._share if is_turn_limited else frontier.num_slots):
            go(slot)
            freed += sizes[slot]
            slot = parents[slot]
            if children[slot] != 1 or state[slot] != mine or (freed >= granules and len(going) >= count):
                break
            after, number = number, entered[slot]
            if number > after and self._place_of(number) >= following:  # as a rule a page queued before its children
                break
        self._freed = freed
        if is_small:
            self._small_pages -= len(going) - before
        if (left := children[slot]) != 1:  # also where there is none before it
            children[slot] = left - 1
        elif frontier.access[slot] < frontier.used_before_ns:
            (self.main if state[slot] & _MAIN else self.small).add(self._place_of(entered[slot]), slot)

    def note(self) -> None:
        """Keep what has become of the pages that queued anew, all at once, which is sooner done."""
        if self._queued:
            queued, first = np.array(self._queued), self._hints.next_number(_QUEUED, len(self._queued))
            self._hints.entered[queued] = (np.arange(first, first + len(queued)) & 0xFFFFFFFF).astype(np.uint32)
            self._hints.queue[queued] = _MAIN
            self._frontier.pages.uses[queued] = (self._states[queued] & _USES) // _ONE_USE
            self._queued.clear()


class _Queue:
    """Ends of chains by their places, first the one that queued first."""

    def __init__(self, ends: Ends) -> None:
        self._ends, self._first = ends, ends.next()
        self._added: list[tuple[int, int]] = []
        self.place = _NOWHERE if self._first is None else self._first[0]
        """Of the first."""

    def add(self, place: int, slot: int) -> None:
        heappush(self._added, (place, slot))
        if place < self.place:
            self.place = place

    def pop(self) -> int:
        """The first; there is one."""
        if self._first is not None and self._first[0] == self.place:
            slot = self._first[2]
            self._first = self._ends.next()
        else:
            slot = heappop(self._added)[1]
        self.place = _NOWHERE if self._first is None else self._first[0]
        if self._added and self._added[0][0] < self.place:
            self.place = self._added[0][0]
        return slot
