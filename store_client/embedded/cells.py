"""A hash table from page names to slots, in shared memory: two candidate buckets of eight cells for each name.

A cell is one aligned 64-bit word, `fingerprint << 32 | slot + 1`, or 0. Readers look without a lock: they find a cell
before or after a change, never half of it. A name lies in the emptier of its two buckets and is never moved, so a
name may find no room, and its page is then not stored: none of 5 million did at half load, what `num_buckets` gives.
"""

from typing import Any

import numpy as np

from store_client.embedded.rows import U32, U64

CELLS = 8
CELL_NBYTES = 8
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_SECOND = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)


def num_buckets(max_pages: int) -> int:
    """Buckets for half load at `max_pages`."""
    return max(8, -(-max_pages * 2 // CELLS))


class Cells:
    """The table over `words`, a uint64 array of `num_buckets * CELLS` zeros to begin with."""

    def __init__(self, words: U64) -> None:
        self._flat = words.data
        self._buckets = words.reshape(-1, CELLS)
        self._count = np.uint64(len(self._buckets))

    def _bucket_pairs(self, hashes: U64) -> U64:
        """(n, 2): the two buckets of each hash."""
        pairs = np.empty((len(hashes), 2), dtype=np.uint64)
        pairs[:, 0] = ((hashes & _LOW) * self._count) >> _SHIFT
        pairs[:, 1] = (((hashes * _SECOND) >> _SHIFT) * self._count) >> _SHIFT
        return pairs

    def _candidates(self, hashes: U64) -> tuple[U64, U64]:
        """The 16 cells of each hash, and the fingerprint that its own cell would have."""
        found = np.take(self._buckets, self._bucket_pairs(hashes).view(np.int64), axis=0)
        return found.reshape(len(hashes), 2 * CELLS), (hashes >> _SHIFT) | _ONE

    def present(self, hashes: U64) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Whether a cell with the fingerprint exists: wrong for an absent name once in 2^27, which is only a miss."""
        cells, prints = self._candidates(hashes)
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = ((cells >> _SHIFT) == prints[:, None]).any(axis=1)
        return found

    def matches_one(self, hashed: int) -> list[int]:
        """The slots of `matches` for one hash, without the fixed cost of arrays."""
        count, wanted = len(self._buckets), hashed >> 32 | 1
        first = ((hashed & 0xFFFFFFFF) * count >> 32) * CELLS
        second = (((hashed * int(_SECOND) & 0xFFFFFFFFFFFFFFFF) >> 32) * count >> 32) * CELLS
        cells = self._flat[first : first + CELLS].tolist() + self._flat[second : second + CELLS].tolist()
        return [(cell & 0xFFFFFFFF) - 1 for cell in cells if cell >> 32 == wanted]

    def matches(self, hashes: U64) -> tuple[U32, U64]:
        """Which hash (index) may be at which slot: one entry per cell with the right fingerprint."""
        cells, prints = self._candidates(hashes)
        which, where = np.nonzero((cells >> _SHIFT) == prints[:, None])
        return which.astype(np.uint32), (cells[which, where] & _LOW) - _ONE

    def cell_of(self, hashes: U64, slots: U32) -> U64:
        """Index of the cell that holds exactly (hash, slot), for each that has one."""
        pairs = self._bucket_pairs(hashes)
        words = np.take(self._buckets, pairs.view(np.int64), axis=0).reshape(len(hashes), 2 * CELLS)
        which, where = np.nonzero(words == self.values(hashes, slots)[:, None])
        bucket = pairs[which, where // CELLS]
        return bucket * np.uint64(CELLS) + (where % CELLS).astype(np.uint64)

    @staticmethod
    def values(hashes: U64, slots: U32) -> U64:
        """The words that name `slots` under `hashes`."""
        return (((hashes >> _SHIFT) | _ONE) << _SHIFT) | (slots.astype(np.uint64) + _ONE)

    def plan(self, hashes: U64) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """A free cell for each new name, all different; -1 where both buckets are full. Changes nothing."""
        pairs = self._bucket_pairs(hashes).astype(np.int64)
        buckets, local = np.unique(pairs, return_inverse=True)
        local = local.reshape(pairs.shape)
        free = self._buckets[buckets] == 0
        room = free.sum(axis=1)
        planned = np.full(len(hashes), -1, dtype=np.int64)
        choices: Any = local.tolist()
        for i, (first, second) in enumerate(choices):
            chosen = first if room[first] >= room[second] else second
            if room[chosen]:
                position = int(free[chosen].argmax())
                free[chosen, position] = False
                room[chosen] -= 1
                planned[i] = buckets[chosen] * CELLS + position
        return planned
