"""Keeps what comes back soonest for the room it takes: how long pages take to come back is measured, not assumed.

A sample gives, for each class of pages and each time since the last use, the chance that a page is used again within
the time ahead. A page is worth the best ratio, over all times ahead, of that chance to the time for which the page has
to be kept: Gittins' index; for caches see LHD (Beckmann et al., NSDI 2018).
"""

from __future__ import annotations

import numpy as np

from store_client.embedded.names import U8, U64, Slots
from store_client.embedded.policies.base import Arrivals, Candidates, Policy, lowest_first
from store_client.embedded.policies.ghosts import Ghosts
from store_client.embedded.policies.hints import BINS, CAME_BACK, F64, LATER, TURNS, USED_BEFORE, USES, Hints
from store_client.embedded.policies.lru import Recency
from store_client.embedded.policies.sample import EDGES, WIDTHS, Sample, bin_of, bins_of, classes_of

_ENOUGH = 256
"""Pages that must have come back before anything is made of it; until then the least recently used go."""
_DOUBT = 8.0
"""So many pages' worth of what holds for all classes goes into the figures of each."""
_RENEWED_AFTER, _MORE = 512, 32
"""Pages stored until the figures are looked at again: one in `_MORE` of those that they are made of, no more than a
quarter of the pool, but at least `_RENEWED_AFTER`."""
_ROUNDS = 6
"""So often is a quarter of each bin moved to either side: by an octave's width, about."""
_NEAR: F64 = np.eye(BINS) / 2 + (np.eye(BINS, k=1) + np.eye(BINS, k=-1)) / 4
_NEAR[0, 0] = _NEAR[-1, -1] = 3 / 4
_SMOOTH: F64 = np.linalg.matrix_power(_NEAR, _ROUNDS)
"""Each bin with parts of those beside it: what comes back at once is many pages, and one bin says little."""
_AHEAD = np.triu(np.ones((BINS, BINS), dtype=bool))
_REMEMBERED = 8
"""A page is known to come back if fewer pages went since than so many times those of the pool."""


class Returns(Policy):
    """Pages whose class and age make a return likely, and soon, stay."""

    name = "auto"

    def __init__(self, hints: Hints) -> None:
        super().__init__(hints)
        self._ghosts, self._sample = Ghosts(hints), Sample(hints)
        self._lines: Lines | None = None
        """None: too little is known."""
        self._uses: U8 = np.zeros(0, dtype=np.uint8)
        """Those of the pages among which the victims are."""
        self._since, self._renewed_after = 0, 0.0

    def stored(self, new: Arrivals, now_ns: int) -> None:
        back, turns = self._ghosts.seen(new.prints, within=_REMEMBERED * new.count)
        self._number_turns(new, back.tolist(), turns.tolist())
        self._sample.stored(new, now_ns)
        self._since += len(new.slots)

    def _number_turns(self, new: Arrivals, back: list[bool], turns: list[int]) -> None:
        """A page that comes back, or hangs on one that was used again, is of a later turn of its conversation.

        The question after a well-known document hangs on it and will not be asked again: that is why what came back
        itself is told apart.
        """
        of, here = self.hints.turn.data, set(new.slots.tolist())
        parents, uses = new.parents.tolist(), new.parent_uses.tolist()
        for slot, parent, used, returned, turn in zip(new.slots.tolist(), parents, uses, back, turns, strict=True):
            if returned:
                of[slot] = LATER | CAME_BACK | turn & USED_BEFORE
            elif parent < len(of):
                of[slot] = of[parent] & LATER or (used > 0 and parent not in here)
            else:
                of[slot] = 0

    def victims(self, pages: Candidates, granules: int, count: int, used_before_ns: int, now_ns: int) -> Slots:
        self._uses = pages.uses
        if self._since >= self._renewed_after:
            self._sample.look(pages)
            worth = self._weigh(now_ns)
            self._lines, self._since = Lines(worth) if worth.any() else None, 0
            more = self._sample.counted() / _MORE  # a little more says little where much is known
            self._renewed_after = max(_RENEWED_AFTER, min(more, pages.count // 4))
        frontier = self.frontier(pages, used_before_ns)
        if self._lines is None:
            return lowest_first(frontier, granules, count, Recency(pages))
        kinds = classes_of(self.hints.turn[: len(pages.uses)], pages.uses)
        return lowest_first(frontier, granules, count, Worth(self._lines, kinds, pages, now_ns), kinds)

    def _weigh(self, now_ns: int) -> F64:
        """What a page of each class is worth at the beginning of each bin; zeros where too little is known."""
        returned, reached = self._sample.figures(now_ns)
        if returned.sum() < _ENOUGH:
            return np.zeros((TURNS * USES, BINS))
        returned, reached = returned @ _SMOOTH, reached @ _SMOOTH
        of_all = (returned.sum(axis=0) + 0.01) / (reached.sum(axis=0) + 1.0)
        chance = np.fmin(np.fmax((returned + _DOUBT * of_all) / (reached + _DOUBT), 0.0), 0.99)  # of garbage, too
        before = np.concatenate([np.ones((len(chance), 1)), np.cumprod(1 - chance, axis=1)], axis=1)
        seconds = before[:, :-1] * (1 - chance / 2) * (np.diff(EDGES) / 1e9)
        # From the last bin back: sums from the first would drown what is left in the last ones.
        ahead = np.concatenate([np.cumsum(seconds[:, ::-1], axis=1)[:, ::-1], np.zeros((len(chance), 1))], axis=1)
        # By class, bin, and the bin up to which a page would be kept: of a page that is still there at `before`, both
        # would have to be divided by that.
        gain = before[:, :-1, None] - before[:, None, 1:]
        cost = ahead[:, :-1, None] - ahead[:, None, 1:]
        return np.divide(gain, cost, out=np.zeros_like(gain), where=_AHEAD).max(axis=2)

    def evicted(self, slots: Slots, prints: U64) -> None:
        self._ghosts.add(prints, self.hints.turn[slots] | (self._uses[slots] > 0) * np.uint8(USED_BEFORE))
        self.hints.tracked[slots] = 0


class Lines:
    """What a page of each class is worth at the beginning of each bin, drawn straight from bin to bin.

    A slope and a start for each class and bin, as arrays for many pages and as lists for one.
    """

    def __init__(self, worth: F64) -> None:
        slopes = np.diff(worth, axis=1, append=worth[:, -1:]) / WIDTHS
        self.slopes, self.starts = slopes.ravel(), (worth - slopes * EDGES[:-1]).ravel()
        self.slope_list: list[float] = self.slopes.tolist()
        self.start_list: list[float] = self.starts.tolist()


class Worth:
    """The rank of a page is its worth, by class and time since the last use."""

    def __init__(self, lines: Lines, kinds: U8, pages: Candidates, now_ns: int) -> None:
        self._lines, self._kinds, self._access, self._now_ns = lines, kinds, pages.access, now_ns
        self._kind, self._used = kinds.data, pages.access.data

    def all(self, slots: Slots) -> F64:
        ages: F64 = float(self._now_ns) - self._access[slots].astype(np.float64)
        np.maximum(ages, 0.0, out=ages)
        cells = bins_of(ages)
        cells += self._kinds[slots] * np.intp(BINS)
        ages *= self._lines.slopes[cells]
        ages += self._lines.starts[cells]
        return ages

    def one(self, slot: int) -> float:
        age = float(max(0, self._now_ns - self._used[slot]))
        cell = self._kind[slot] * BINS + bin_of(age)
        return age * self._lines.slope_list[cell] + self._lines.start_list[cell]
