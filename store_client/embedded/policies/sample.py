"""How long pages take to come back: a sample of them is timed from use to use, whether they are in the pool or not.

The sample is a table that all processes of the pool share. A page enters it when it is stored, and leaves it for
another one when it was not used for the longest time.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from store_client.embedded.names import U8, U64
from store_client.embedded.policies.base import Arrivals, Candidates
from store_client.embedded.policies.hints import (
    BINS,
    CAME_BACK,
    F64,
    LATER,
    TRACKED,
    TURNS,
    USED_BEFORE,
    USES,
    WAYS,
    Hints,
)
from store_client.embedded.table import MOST_USES

_SHIFT = 3
"""Word of the header: one page in 2 ** shift is in the sample."""
_REACH = 8
"""The sample covers at least so many times the pages of the pool."""
_FIRST_NS = 1 << 28
"""End of the first bin: a quarter of a second. There are two in an octave."""
_FADE = 1 << 15
"""So many pages count; then what was seen before counts half."""

Places = npt.NDArray[np.int64]

EDGES: F64 = np.concatenate([[0.0], _FIRST_NS * 2.0 ** (np.arange(BINS) // 2) * (1 + 0.5 * (np.arange(BINS) % 2))])
"""Beginning of each bin of time since the last use, in nanoseconds, and the end of the last."""
WIDTHS: F64 = np.diff(EDGES)
_BEFORE_FIRST = (int(np.float64(_FIRST_NS).view(np.int64)) >> 51) - 1
"""Subtracted from an age's exponent and first bit of fraction, which count half octaves, it leaves the bin."""
_EDGE_LIST: list[float] = EDGES.tolist()


def bins_of(ages_ns: F64) -> Places:
    """The bin of each age, by the upper 13 bits of its float; as `bin_of`."""
    found: Places = (ages_ns.view(np.int64) >> 51) - _BEFORE_FIRST
    np.maximum(found, 0, out=found)
    return np.minimum(found, BINS - 1, out=found)


def bin_of(age_ns: float) -> int:
    return min(max(0, bisect_right(_EDGE_LIST, age_ns) - 1), BINS - 1)


def classes_of(turns: U8, uses: U8) -> U8:
    """The class of each page: by its turn of the conversation, and whether it was used, now or before it went, or came
    back at least."""
    used = (uses | turns & np.uint8(USED_BEFORE)) != 0
    known = np.maximum(used * np.uint8(2), (turns & np.uint8(CAME_BACK)) != 0)
    classes: U8 = (turns & np.uint8(LATER)) * np.uint8(USES) + known
    return classes


class Sample:
    """For the holder of the write lock."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints

    def stored(self, new: Arrivals, now_ns: int) -> None:
        """Of these pages, such as were in the sample have come back; others enter it. Their turns are known."""
        hints = self._hints
        hints.tracked[new.slots] = 0
        shift = self._thin(new.count)
        mine = (new.prints >> np.uint64(40)) & np.uint64((1 << shift) - 1) == 0
        slots = new.slots[mine]
        # One after the other: puts bring few pages at a time, of which arrays would take longer.
        entries = [self._enter(name, now_ns) for name in new.prints[mine].tolist()]
        at = np.array(entries, dtype=np.int64)
        hints.track_slot[at] = slots
        hints.track_uses[at] = 0
        hints.track_class[at] = classes_of(hints.turn[slots], hints.track_uses[at])
        hints.tracked[slots] = at + 1

    def _enter(self, name: int, now_ns: int) -> int:
        """The entry of the page whose name has this hash, used now; which it may have to take from another one."""
        hints = self._hints
        first = name % (TRACKED // WAYS) * WAYS
        names = hints.track_print[first : first + WAYS].tolist()
        if name in names:
            at = first + names.index(name)
            self._note_one(hints.returned, at, now_ns)
        elif 0 in names:
            at = first + names.index(0)
        else:
            used = hints.track_used[first : first + WAYS].tolist()
            at = first + used.index(min(used))
            self._note_one(hints.lost, at, now_ns)
        hints.track_print[at], hints.track_used[at] = name, now_ns
        return int(at)

    def _thin(self, num_pages: int) -> int:
        hints = self._hints
        shift = min(int(hints.header[_SHIFT]), 20)
        while shift < 20 and TRACKED << shift < _REACH * num_pages:
            shift += 1
            hints.track_print[(hints.track_print >> np.uint64(40)) & np.uint64((1 << shift) - 1) != 0] = 0
            hints.header[_SHIFT] = shift
        return shift

    def counted(self) -> float:
        """So many pages' uses and losses are known."""
        hints = self._hints
        return float(hints.returned.sum() + hints.lost.sum()) * (1 << min(int(hints.header[_SHIFT]), 20))

    def _note(self, table: F64, at: Places, now_ns: int | U64) -> None:
        """These entries were used, or lost, at `now_ns`."""
        ages = np.maximum(0.0, np.asarray(now_ns, dtype=np.float64) - self._hints.track_used[at])
        np.add.at(table, (self._hints.track_class[at] % (TURNS * USES), bins_of(ages)), 1.0)

    def _note_one(self, table: F64, at: int, now_ns: int) -> None:
        table[self._hints.track_class[at] % (TURNS * USES), bin_of(now_ns - int(self._hints.track_used[at]))] += 1.0

    def look(self, pages: Candidates) -> None:
        """See which pages of the sample were used in the pool since the last look."""
        hints = self._hints
        at = np.flatnonzero(hints.track_print)
        slots = hints.track_slot[at].astype(np.int64)
        there = slots < len(pages.granules)
        at, slots = at[there], slots[there]
        there = (hints.tracked[slots] == at + 1) & (pages.granules[slots] > 0)
        at, slots = at[there], slots[there]
        used = pages.access[slots]
        later = used > hints.track_used[at]
        at, slots, used = at[later], slots[later], used[later]
        uses = pages.uses[slots]
        again = (uses > hints.track_uses[at]) | (uses == MOST_USES)
        self._note(hints.returned, at[again], used[again])
        hints.track_used[at] = used
        hints.track_uses[at] = uses
        hints.track_class[at] = classes_of(hints.turn[slots], uses)

    def figures(self, now_ns: int) -> tuple[F64, F64]:
        """By class and bin: pages that were used again, and those that reached the bin without."""
        hints = self._hints
        if not (np.isfinite(hints.returned).all() and np.isfinite(hints.lost).all()):  # garbage would stay for ever
            hints.returned[:] = hints.lost[:] = 0
        ages = np.maximum(0.0, float(now_ns) - hints.track_used)
        cells = bins_of(ages)
        cells += (hints.track_class % (TURNS * USES)).astype(np.intp) * BINS
        cells[hints.track_print == 0] = hints.lost.size
        left = hints.lost + np.bincount(cells, minlength=hints.lost.size)[: hints.lost.size].reshape(hints.lost.shape)
        reached = np.cumsum((hints.returned + left)[:, ::-1], axis=1)[:, ::-1]
        returned = hints.returned.copy()
        if returned.sum() + hints.lost.sum() > _FADE:
            hints.returned *= 0.5
            hints.lost *= 0.5
        return returned, reached - 0.5 * left
