"""What policies remember beside the page table: columns, pages that went, and how long pages take to come back.

Plain arrays, in a pool's mapped file or in memory. All of it is hints: a torn or foreign value makes a decision better
or worse and nothing else, so whatever is read as a place is held against its bounds.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from store_client.embedded.names import U8, U32, U64

F64 = npt.NDArray[np.float64]
U16 = npt.NDArray[np.uint16]

TRACKED = 1 << 14
"""Pages whose returns are timed: a sample."""
WAYS = 8
TURNS, USES, BINS = 2, 3, 44
"""Classes of pages, and bins of the time between two uses."""
LATER, CAME_BACK, USED_BEFORE = 0x01, 0x40, 0x80
"""Of a page: it is of a later turn of its conversation than the first; it went and came back; it was used before it
went. The first makes `TURNS`; the others make `USES`, together with whether it was used since."""
_MOST_GHOSTS = 1 << 18
_HEADER_WORDS = 512


def _num_ghosts(max_pages: int) -> int:
    """Pages that went and are remembered: a quarter to half as many as the index has room for, which is far from full
    where pages are larger than the least."""
    return min(_MOST_GHOSTS, 1 << max(10, (max_pages - 1).bit_length() - 2))


def _layout(num_slots: int, max_pages: int) -> list[tuple[str, str, int]]:
    """Name, type and length of each array, widest first."""
    slots, ghosts, classes = -(-num_slots // 8) * 8, _num_ghosts(max_pages), TURNS * USES * BINS
    return [
        ("header", "<u8", _HEADER_WORDS), ("ghosts", "<u8", ghosts), ("track_print", "<u8", TRACKED),
        ("track_used", "<u8", TRACKED), ("returned", "<f8", classes), ("lost", "<f8", classes),
        ("entered", "<u4", slots), ("track_slot", "<u4", TRACKED), ("tracked", "<u2", slots), ("queue", "u1", slots),
        ("turn", "u1", slots), ("ghost_turn", "u1", ghosts), ("track_class", "u1", TRACKED),
        ("track_uses", "u1", TRACKED),
    ]  # fmt: skip


def hints_nbytes(max_pages: int) -> int:
    """Size of the hints of a pool with room for so many pages: 8 bytes each, and up to 2.7 MiB."""
    return _nbytes(_layout(max_pages, max_pages))


def _nbytes(layout: list[tuple[str, str, int]]) -> int:
    return sum(np.dtype(dtype).itemsize * count for _, dtype, count in layout)


class Hints:
    """The arrays in `memory`, `hints_nbytes` long, zeros to begin with; None: in memory of their own.

    `num_slots`: as in the page table; `max_pages` where the pool has room for more pages than are used of it.
    """

    header: U64
    ghosts: U64
    """High half of a name's hash, and the number of the page's eviction."""
    ghost_turn: U8
    entered: U32
    """Place of each page in its queue."""
    queue: U8
    turn: U8
    """Of the conversation that the page belongs to, and what is known of the page: `LATER` and what follows it."""
    tracked: U16
    """Entry of the sample that times this page, plus one; 0: none."""
    track_print: U64
    """Of each page in the sample: hash of its name, or 0; then its last use, slot, class and uses as last seen."""
    track_used: U64
    track_slot: U32
    track_class: U8
    track_uses: U8
    returned: F64
    """Pages that were used again, by class and time since the last use."""
    lost: F64
    """Pages that fell out of the sample before."""

    def __init__(self, memory: mmap.mmap | None, num_slots: int, max_pages: int | None = None) -> None:
        layout = _layout(num_slots, max_pages or num_slots)
        buffer: Any = bytearray(_nbytes(layout)) if memory is None else memory
        at = 0
        for name, dtype, count in layout:
            array = np.frombuffer(buffer, dtype=dtype, count=count, offset=at)
            at += array.nbytes
            of_slots = name in ("entered", "tracked", "queue", "turn")
            setattr(self, name, array.reshape(-1, BINS) if dtype == "<f8" else array[:num_slots] if of_slots else array)

    def next_number(self, word: int, count: int) -> int:
        """Numbers from here on, `count` of them, nobody else's."""
        first = int(self.header[word]) & 0xFFFFFFFFFFFF
        self.header[word] = first + count
        return first
