"""Free space, and where pages go in the arena: contiguous where possible, gathered from small runs where not.

Free space is sorted runs (start, length), in any unit: granules of the arena, or slots of the page table. They are pure
and in memory; who calls keeps them consistent by storing `to_bytes` in the transaction that hands space out.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mooncake_connector.log import get_logger, log_once
from mooncake_connector.sizes import human_nbytes
from store_client.embedded.arena import GRANULE, GROWTH_NBYTES, Arena
from store_client.embedded.row import INLINE_EXTENTS

if TYPE_CHECKING:
    from store_client.embedded.ledger import Draft

logger = get_logger(__name__)

Runs = npt.NDArray[np.uint32]
"""Shape (n, 2): start and length of each run."""
Piece = tuple[int, int]
"""(first granule, granules)."""

LIST_ENTRY_NBYTES = 8
MAX_PIECES = GRANULE // LIST_ENTRY_NBYTES
_GROWTH = GROWTH_NBYTES // GRANULE
_RETRY_GROWTH_S = 1.0


def as_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    return np.array(list(runs), dtype=np.uint32).reshape(-1, 2)


class FreeRuns:
    """A set of disjoint free runs, coalesced and sorted by start."""

    def __init__(self, runs: Runs) -> None:
        self._start = runs[:, 0].astype(np.int64)
        self._length = runs[:, 1].astype(np.int64)

    @classmethod
    def from_bytes(cls, blob: bytes) -> "FreeRuns":
        return cls(np.frombuffer(blob, dtype="<u4").reshape(-1, 2))

    def to_bytes(self) -> bytes:
        return np.stack([self._start, self._length], axis=1).astype("<u4").tobytes()

    def __len__(self) -> int:
        return len(self._start)

    def is_sound(self, limit: int) -> bool:
        """True if the runs are in order, disjoint, not empty and below `limit`."""
        end = self._start + self._length
        return bool((self._length > 0).all() and (self._start[1:] >= end[:-1]).all() and (end <= limit).all())

    @property
    def total(self) -> int:
        """Units free."""
        return int(self._length.sum())

    def runs(self) -> Runs:
        return np.stack([self._start, self._length], axis=1).astype(np.uint32)

    def take_whole(self, count: int, size: int) -> list[int]:
        """Take up to `count` contiguous pieces of `size` units, best fit first; return the start of each."""
        starts: list[int] = []
        while len(starts) < count:
            fits = np.flatnonzero(self._length >= size)
            if not len(fits):
                break
            wanted = (count - len(starts)) * size
            lengths = self._length[fits]
            holds_all = lengths >= wanted
            best = (
                int(fits[np.argmin(np.where(holds_all, lengths, np.iinfo(np.int64).max))])
                if holds_all.any()
                else (int(fits[np.argmin(lengths)]))
            )
            pieces = min(count - len(starts), int(self._length[best]) // size)
            first = int(self._start[best])
            starts.extend(range(first, first + pieces * size, size))
            self._cut(best, pieces * size)
        return starts

    def take_pieces(self, size: int, max_pieces: int) -> list[tuple[int, int]] | None:
        """Gather `size` units from the largest runs down; None (and nothing taken) if that takes too many pieces."""
        by_size = np.argsort(self._length, kind="stable")[::-1][:max_pieces]
        reach = np.cumsum(self._length[by_size])
        enough = int(np.searchsorted(reach, size))
        if enough >= len(by_size):
            return None
        pieces: list[tuple[int, int]] = []
        left = size
        for i in by_size[: enough + 1]:
            length = min(left, int(self._length[i]))
            pieces.append((int(self._start[i]), length))
            self._start[i] += length
            self._length[i] -= length
            left -= length
        self._drop_empty()
        return pieces

    def add(self, runs: Runs) -> None:
        """Give runs back; they must not overlap what is free."""
        if not len(runs):
            return
        start = np.concatenate([self._start, runs[:, 0].astype(np.int64)])
        length = np.concatenate([self._length, runs[:, 1].astype(np.int64)])
        order = np.argsort(start, kind="stable")
        start, length = start[order], length[order]
        end = start + length
        if (start[1:] < end[:-1]).any():
            raise ValueError("space given back is free already: the free list would hold it twice")
        heads = np.flatnonzero(np.concatenate([[True], start[1:] != end[:-1]]))
        tails = np.concatenate([heads[1:] - 1, [len(start) - 1]])
        self._start = start[heads]
        self._length = end[tails] - start[heads]

    def clip(self, limit: int) -> None:
        """Forget everything at and beyond `limit`."""
        self._length = np.minimum(self._start + self._length, limit) - self._start
        self._drop_empty()

    def _cut(self, i: int, size: int) -> None:
        self._start[i] += size
        self._length[i] -= size
        if not self._length[i]:
            self._start = np.delete(self._start, i)
            self._length = np.delete(self._length, i)

    def _drop_empty(self) -> None:
        kept = self._length > 0
        self._start, self._length = self._start[kept], self._length[kept]


def without(start: int, stop: int, taken: Runs) -> Runs:
    """What of `start .. stop` lies in none of the runs, which must not overlap each other."""
    order = np.argsort(taken[:, 0], kind="stable")
    first = taken[order, 0].astype(np.int64)
    last = first + taken[order, 1]
    starts = np.concatenate([[start], np.clip(last, start, stop)])
    ends = np.concatenate([np.clip(first, start, stop), [stop]])
    kept = ends > starts
    return np.stack([starts[kept], ends[kept] - starts[kept]], axis=1).astype(np.uint32)


def clip_runs(runs: Runs, limit: int) -> tuple[Runs, Runs]:
    """Split runs at `limit`: what lies below, and what lies at or beyond it."""
    start, length = runs[:, 0].astype(np.int64), runs[:, 1].astype(np.int64)
    end = start + length
    below = np.stack([start, np.clip(np.minimum(end, limit) - start, 0, None)], axis=1)
    cut = np.maximum(start, limit)
    beyond = np.stack([cut, np.clip(end - cut, 0, None)], axis=1)
    return below[below[:, 1] > 0].astype(np.uint32), beyond[beyond[:, 1] > 0].astype(np.uint32)


def _granules_of(nbytes: int) -> int:
    return -(-nbytes // GRANULE)


class Allocator:
    """Takes space within a ledger transaction, and secures more of the arena file when there is none."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._no_growth_before = 0.0

    def make_room(self, draft: "Draft", count: int, nbytes: int) -> str:
        """Grow the arena until the pages fit or it is at its limit; returns the cause should they not fit."""
        wanted = count * _granules_of(nbytes)
        while draft.free.total < wanted and draft.high_water < draft.capacity:
            if not self._grow(draft, wanted - draft.free.total):
                return "no_space"
        return "full"

    def _grow(self, draft: "Draft", wanted: int) -> bool:
        if time.monotonic() < self._no_growth_before:
            return False
        left = draft.capacity - draft.high_water
        for step in (max(_GROWTH, wanted), wanted, _GROWTH // 16):
            size = min(step, left)
            try:
                self._arena.secure(draft.high_water, draft.high_water + size)
            except OSError as error:
                reason = error
                continue
            # A writer may still fill space that a shrink cut off and that comes back here.
            held = np.concatenate([as_runs([]), *(reservation.space_runs for reservation in draft.reservations())])
            draft.free.add(without(draft.high_water, draft.high_water + size, held))
            draft.high_water += size
            return True
        self._no_growth_before = time.monotonic() + _RETRY_GROWTH_S
        log_once(
            "store.no_space",
            "the pool has no room to grow (%s): using %s of %s, evicting beyond that; make room, or set a smaller "
            "capacity",
            reason, human_nbytes(draft.high_water * GRANULE), human_nbytes(draft.capacity * GRANULE), logger=logger,
        )  # fmt: skip
        return False

    @staticmethod
    def shortage(draft: "Draft", count: int, nbytes: int) -> tuple[int, int]:
        """Granules and slots that are missing for `count` pages; zero or less where there are enough.

        A granule a page is added once free space is in small runs, for the list of a page's extents.
        """
        need = count * _granules_of(nbytes)
        free = draft.free
        if len(free) > INLINE_EXTENTS:
            need += count
        return need - free.total, count - draft.slots.total

    @staticmethod
    def take(draft: "Draft", count: int, nbytes: int) -> list[list[Piece]]:
        """The extents of up to `count` pages; as many as there is space and slots for."""
        size = _granules_of(nbytes)
        count = min(count, draft.slots.total)
        pages: list[list[Piece]] = [[(start, size)] for start in draft.free.take_whole(count, size)]
        while len(pages) < count:
            pieces = draft.free.take_pieces(size, INLINE_EXTENTS)
            if pieces is None:
                # One granule more, in front, for the list of the others.
                pieces = draft.free.take_pieces(size + 1, MAX_PIECES)
                if pieces is None:
                    break
                first, length = pieces[0]
                pieces[:1] = [(first, 1), (first + 1, length - 1)] if length > 1 else [(first, 1)]
            pages.append(pieces)
        return pages
