"""The page table: a mapped file that readers search without a lock, and writers change by applying redo records.

Header (totals and counters), rows (one per slot), columns that are mere hints (recency), and the hash cells. What is
true is decided by the LMDB transaction that holds the redo record; this file is its applied state.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_connector.kv.keys import KEY_NBYTES
from store_client.embedded import cells as cells_
from store_client.embedded import rows as rows_
from store_client.embedded.clock import now_ns
from store_client.embedded.faults import Damaged
from store_client.embedded.files import open_file
from store_client.embedded.journal import Record
from store_client.embedded.rows import INLINE_EXTENTS, ROW_DTYPE, ROW_NBYTES, U8, U32, U64, Row

HEADER_NBYTES = 4096
COUNTERS = (
    "hit_pages", "missed_pages", "hit_tokens", "missed_tokens", "read_pages", "read_nbytes", "stored_pages",
    "stored_nbytes", "present_pages", "evicted_pages", "removed_pages", "corrupt_pages", "reclaimed_nbytes",
)  # fmt: skip
CAUSES = ("busy", "full", "no_space", "corrupt", "geometry", "index", "changed", "reclaimed", "error")
_APPLIED, _PAGES, _USED, _CAPACITY = range(4)
_FIRST_COUNTER = 64
_COLUMN_NBYTES = 8 + 8 + 4 + 4 + 4
_ROWS_AT_ONCE = 1 << 16


def table_nbytes(max_pages: int) -> int:
    """Size of the file: 156 bytes a page for row and columns, 16 for cells, and the header."""
    cells = cells_.num_buckets(max_pages) * cells_.CELLS * cells_.CELL_NBYTES
    return HEADER_NBYTES + max_pages * (ROW_NBYTES + _COLUMN_NBYTES) + cells


@dataclass(frozen=True, slots=True)
class Found:
    """A page as a reader met it: its row, and the bytes of that row to compare with later."""

    slot: int
    raw: bytes
    row: Row


class Table:
    """The mapped page table. Reading methods take no lock; `apply` is for the holder of the write lock."""

    def __init__(self, path: Path, max_pages: int) -> None:
        fd = open_file(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, table_nbytes(max_pages))
        finally:
            os.close(fd)
        self.max_pages = max_pages
        at = HEADER_NBYTES

        def column(dtype: str, count: int) -> np.ndarray:
            nonlocal at
            array = np.frombuffer(self._map, dtype=dtype, count=count, offset=at)
            at += array.nbytes
            return array

        self._header = np.frombuffer(self._map, dtype="<u8", count=HEADER_NBYTES // 8)
        self.rows: U8 = column("u1", max_pages * ROW_NBYTES).reshape(max_pages, ROW_NBYTES)
        self._flat_rows = self.rows.reshape(-1).data
        self._words: U64 = column("<u8", cells_.num_buckets(max_pages) * cells_.CELLS)
        self._cells = cells_.Cells(self._words)
        self.access: U64 = column("<u8", max_pages)
        """`clock.now_ns()` of the last read or put of the page: a hint."""
        self.space: U64 = column("<u8", max_pages)
        self.parent: U32 = column("<u4", max_pages)
        self.depth: U32 = column("<u4", max_pages)
        self.granules: U32 = column("<u4", max_pages)
        """Space of the page in the arena; 0: no page at this slot."""

    @property
    def applied(self) -> int:
        """Number of the last redo record that is fully in this file."""
        return int(self._header[_APPLIED])

    @property
    def pages(self) -> int:
        return int(self._header[_PAGES])

    @property
    def used_granules(self) -> int:
        return int(self._header[_USED])

    @property
    def capacity_granules(self) -> int:
        return int(self._header[_CAPACITY])

    def set_capacity(self, granules: int) -> None:
        """A copy for readers; the truth is in the transaction."""
        self._header[_CAPACITY] = granules

    def counters(self) -> dict[str, int]:
        """All counters and failures by name, as far as processes have handed theirs in."""
        names = (*COUNTERS, *CAUSES)
        return dict(zip(names, self._header[_FIRST_COUNTER : _FIRST_COUNTER + len(names)].tolist(), strict=True))

    def add_counters(self, deltas: dict[str, int]) -> None:
        for i, name in enumerate((*COUNTERS, *CAUSES)):
            if deltas.get(name):
                count = int(self._header[_FIRST_COUNTER + i]) + deltas[name]
                self._header[_FIRST_COUNTER + i] = count & 0xFFFFFFFFFFFFFFFF

    def present(self, keys: U8, space: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """Whether each key is in the table, by its fingerprint (see `Cells.present`)."""
        return self._cells.present(rows_.hash_keys(keys, space))

    def present_one(self, key: bytes, space: int) -> bool:
        """Whether one key is in the table, by its full name."""
        for slot in self._cells.matches_one(rows_.hash_key(key, space)):
            at = slot * ROW_NBYTES
            if slot < self.max_pages and self._flat_rows[at : at + KEY_NBYTES] == key and self.space[slot] == space:
                return True
        return False

    def slots(self, keys: U8, space: int) -> list[int]:
        """The slot of each key, by its full name; -1 where it is absent."""
        which, candidates = self._cells.matches(rows_.hash_keys(keys, space))
        found = [-1] * len(keys)
        valid = candidates < np.uint64(self.max_pages)
        which, slots = which[valid], candidates[valid].astype(np.int64)
        rows = np.take(self.rows, slots, axis=0).reshape(-1).view(ROW_DTYPE)
        same = (rows["key"] == keys[which]).all(axis=1) & (rows["space"] == space)
        for i, slot in zip(which[same].tolist(), slots[same].tolist(), strict=True):
            found[i] = slot
        return found

    def at(self, slot: int, key: bytes, space: int) -> Found | None:
        """What slot holds, if it is this page and whole."""
        raw = self.rows[slot].tobytes()
        row = rows_.decode(raw)
        if row is None or row.key != key or row.space != space:
            return None
        return Found(slot, raw, row)

    def any_at(self, slot: int) -> Found | None:
        """Whatever page is at slot."""
        raw = self.rows[slot].tobytes()
        row = rows_.decode(raw)
        return None if row is None else Found(slot, raw, row)

    def check(self, slots: Sequence[int]) -> None:
        """Raises Damaged where a slot should hold a page and its row is none. Under the write lock only."""
        for slot in slots:
            if self.granules[slot] and rows_.decode(self.rows[slot].tobytes()) is None:
                raise Damaged(f"the row of the page at slot {slot} does not match its checksum")

    def created(self, slots: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> U32:
        """Unix time in seconds at which the pages at `slots` were stored."""
        created: U32 = np.take(self.rows, slots, axis=0).reshape(-1).view(ROW_DTYPE)["created"]
        return created

    def unchanged(self, found: Found) -> bool:
        """True if the page is still where it was found, so that what was read in between are its bytes."""
        return self.rows[found.slot].tobytes() == found.raw

    def touch(self, slots: Sequence[int]) -> None:
        """Note that these pages were used now."""
        self.access[np.asarray(slots, dtype=np.int64)] = now_ns()

    def apply(self, record: Record, accessed_ns: int) -> None:
        """Carry out a committed record; applying one again changes nothing."""
        self._words[record.clear_cells] = 0
        self.rows[record.clear_slots] = 0
        self.granules[record.clear_slots] = 0
        if len(record.set_slots):
            slots = record.set_slots
            rows = np.ascontiguousarray(record.set_rows).reshape(-1).view(ROW_DTYPE)
            for name, column in (("parent", self.parent), ("depth", self.depth), ("space", self.space)):
                column[slots] = rows[name]
            self.access[slots] = accessed_ns
            self.rows[slots] = record.set_rows
            self.granules[slots] = rows["granules"]
            self._words[record.set_cells] = record.set_words
        self._header[_PAGES] = record.pages
        self._header[_USED] = record.used_granules
        self._header[_APPLIED] = record.number

    def plan_cells(self, hashes: U64) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return self._cells.plan(hashes)

    @staticmethod
    def words(hashes: U64, slots: U32) -> U64:
        """The cells' values that name `slots` under `hashes`."""
        return cells_.Cells.values(hashes, slots)

    def cells_of(self, slots: U32) -> U64:
        """The cells that name the pages at `slots`."""
        rows = np.take(self.rows, slots.astype(np.int64), axis=0).reshape(-1).view(ROW_DTYPE)
        return self._cells.cell_of(rows_.hash_keys(rows["key"], rows["space"].astype(np.uint64)), slots)

    def count_names(self) -> int:
        """Cells in use: as many as pages."""
        return int(np.count_nonzero(self._words))

    def slots_beyond(self, limit: int) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", list[int]]:
        """Slots of pages with space beyond granule `limit`, as far as their rows say, and of those whose extents are
        listed elsewhere."""
        live = self.live_slots()
        beyond = np.zeros(len(live), dtype=np.bool_)
        listed: list[int] = []
        for at in range(0, len(live), _ROWS_AT_ONCE):
            slots = live[at : at + _ROWS_AT_ONCE]
            rows = np.take(self.rows, slots, axis=0).reshape(-1).view(ROW_DTYPE)
            ends = rows["extents"].astype(np.int64).reshape(len(slots), -1, 2).sum(axis=2)
            beyond[at : at + len(slots)] = (ends > limit).any(axis=1)
            listed += slots[rows["num_extents"] > INLINE_EXTENTS].tolist()
        return live[beyond], listed

    def live_slots(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Slots that hold a page."""
        return np.flatnonzero(self.granules)
