"""From pieces of device memory to what a copy kernel takes, and to the slots of a staging buffer. Pure.

A kernel is quick where each of its programs copies a bounded chunk in words as wide as both addresses allow. A piece is
therefore cut into a body of its widest words and up to two ends of single bytes, and the body into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from transfer.transports.base import Int64
from transfer.transports.vectors import Pieces
from transfer.transports.wire import MAX_ORDER_PIECES

MAX_WIDTH = 16
CHUNK_NBYTES = 32 << 10


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch of the kernel: a row of chunks that are copied in words of `width` bytes.

    Args:
        width: 16, 8, 4, 2 or 1; divides every source, destination and size.
        table: int64 [3, chunks]: source addresses, destination addresses, sizes in bytes, none of them 0.
    """

    width: int
    table: Int64


def launches(source: Int64, destination: Int64, nbytes: Int64, chunk_nbytes: int = CHUNK_NBYTES) -> list[Launch]:
    """Copy `nbytes[i]` bytes from `source[i]` to `destination[i]`, for every i, the widest words first.

    Args:
        chunk_nbytes: of one program at most, a multiple of `MAX_WIDTH`.
    """
    if len(nbytes) and nbytes.min() > 0 and not np.bitwise_or.reduce(source | destination | nbytes) % MAX_WIDTH:
        return [Launch(MAX_WIDTH, _chunks(np.stack((source, destination, nbytes)), chunk_nbytes))]
    distance = (source - destination) | MAX_WIDTH
    width = distance & -distance
    head = np.minimum(-source % width, nbytes)
    tail = (nbytes - head) % width
    ones = np.ones_like(width)
    starts = np.stack((np.zeros_like(head), head, nbytes - tail), axis=1)
    sizes = np.stack((head, nbytes - head - tail, tail), axis=1).ravel()
    widths = np.stack((ones, width, ones), axis=1).ravel()
    table = np.stack(((source[:, None] + starts).ravel(), (destination[:, None] + starts).ravel(), sizes))
    return [
        Launch(int(one), _chunks(table[:, chosen], chunk_nbytes))
        for one in np.unique(widths)[::-1]
        if (chosen := (widths == one) & (sizes > 0)).any()
    ]


def _chunks(table: Int64, chunk_nbytes: int) -> Int64:
    if table[2].max() <= chunk_nbytes:
        return table
    counts = -(-table[2] // chunk_nbytes)
    owner = np.repeat(np.arange(len(counts)), counts)
    done = (np.arange(len(owner)) - (counts.cumsum() - counts)[owner]) * chunk_nbytes
    cut = table[:, owner]
    cut[:2] += done
    cut[2] = np.minimum(cut[2] - done, chunk_nbytes)
    return cut


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One filling of one slot of a staging buffer: `pieces`, one after the other, in their order.

    Args:
        place: where the slot begins, in bytes from the buffer's start.
    """

    place: int
    pieces: Pieces

    def gather(self, staging: int) -> tuple[Int64, Int64, Int64]:
        """Sources, destinations and sizes of what fills the slot of a buffer at address `staging`."""
        return np.asarray(self.pieces.local), *self._inside(staging)

    def scatter(self, staging: int) -> tuple[Int64, Int64, Int64]:
        """The same for what brings a filled slot to the pieces' destinations."""
        places, nbytes = self._inside(staging)
        return places, np.asarray(self.pieces.remote), nbytes

    def _inside(self, staging: int) -> tuple[Int64, Int64]:
        nbytes = np.asarray(self.pieces.nbytes, dtype=np.int64)
        return staging + self.place + nbytes.cumsum() - nbytes, nbytes


def slots(pieces: Pieces, slot_nbytes: int, num_slots: int) -> Iterator[Slot]:
    """The same copies as fillings of `num_slots` slots in turn, so that one is sent while the next is filled."""
    for number, part in enumerate(pieces.slices(slot_nbytes, MAX_ORDER_PIECES)):
        yield Slot(number % num_slots * slot_nbytes, part)
