"""The page table: a mapped file that readers search without a lock, and writers change by applying redo records.

Header (totals and counters), rows (one per slot), columns that are mere hints (recency), and the hash cells. What is
true is decided by the LMDB transaction that holds the redo record; this file is its applied state.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.metrics.registry import AGES_S
from store_client.embedded.faults import Damaged
from store_client.embedded.locks import open_file
from store_client.embedded.names import (
    CELL_NBYTES,
    CELLS,
    U8,
    U32,
    U64,
    Bools,
    Cells,
    Slots,
    hash_key,
    hash_keys,
    num_buckets,
)
from store_client.embedded.redo import Record
from store_client.embedded.row import INLINE_EXTENTS, ROW_DTYPE, ROW_NBYTES, Row

HEADER_NBYTES = 4096
COUNTERS = (
    "hit_pages", "missed_pages", "hit_tokens", "missed_tokens", "read_pages", "read_nbytes", "stored_pages",
    "stored_nbytes", "present_pages", "evicted_pages", "removed_pages", "corrupt_pages", "reclaimed_nbytes",
)  # fmt: skip
CAUSES = ("busy", "full", "no_space", "corrupt", "geometry", "index", "changed", "reclaimed", "error")
AGES = (*(f"evicted_within_{bound_s:.0f}_s" for bound_s in AGES_S), "evicted_later", "evicted_unused_s")
"""How many pages were evicted that had not been used for longer than the bound before and not longer than this one, and
the seconds of all together."""
_NAMED = (*COUNTERS, *CAUSES, *AGES)
"""In the order of the header: a new name goes to the end, and older pools have it as 0."""
_APPLIED, _PAGES, _USED, _CAPACITY, _CLEARS, _HANDOVERS = range(6)
_EVICTION, _COUNTS_USES = 16, 17
_FIRST_COUNTER = 64
_COLUMN_NBYTES = 8 + 8 + 4 + 4 + 4
_ROWS_AT_ONCE = 1 << 16

READ, BROUGHT = 1, 2
"""Marks in the lowest bits of a page's time of last use: that it was read since it was stored, and that it did not come
from an engine but from a tier. Hints like that time: a mark may be lost where two processes set it at once."""
_MARKS = READ | BROUGHT
MOST_USES = 15
"""How often a page was used is counted up to here, in the bits above the marks: reads, and puts of what was there, once
for all within a second, since a request may touch a page several times. A hint as well."""
_USE, _USES = 4, 4 * MOST_USES
_HINTS = _MARKS | _USES
USES_APART_NS = 1_000_000_000

def now_ns() -> int:
    """Nanoseconds since the machine was started, sleep included: the clock that page uses are noted by.

    Nobody can set it, and it runs as long as a pool may live, from boot to boot. Processes in another time namespace
    (rare: no container runtime makes one by default) may see it shifted; so a time that lies ahead is possible, and
    means nothing but "lately".
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def table_nbytes(max_pages: int) -> int:
    """Size of the file: 156 bytes a page for row and columns, 16 for cells, and the header."""
    cells = num_buckets(max_pages) * CELLS * CELL_NBYTES
    return HEADER_NBYTES + max_pages * (ROW_NBYTES + _COLUMN_NBYTES) + cells


def counters_in(header: U64) -> dict[str, int]:
    """Everything in `_NAMED`, out of a header's words."""
    return dict(zip(_NAMED, header[_FIRST_COUNTER : _FIRST_COUNTER + len(_NAMED)].tolist(), strict=True))


def totals_in(header: U64) -> tuple[int, int, int]:
    """Pages, granules that they take, and granules that they may take."""
    return int(header[_PAGES]), int(header[_USED]), int(header[_CAPACITY])


def handovers_in(header: U64) -> int:
    """How often counts were handed over, twice; odd while they are. See `Table.handing_over`."""
    return int(header[_HANDOVERS])


class Found(NamedTuple):
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
        self._words: U64 = column("<u8", num_buckets(max_pages) * CELLS)
        self.cells = Cells(self._words)
        self.access: U64 = column("<u8", max_pages)
        """`now_ns()` of the last read or put of the page, but for its lowest bits (READ, BROUGHT, and the number of its
        uses): a hint."""
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

    @property
    def clears(self) -> int:
        """How many times pages of a namespace, or all, were cleared."""
        return int(self._header[_CLEARS])

    def count_clear(self) -> None:
        """Under the write lock only."""
        self._header[_CLEARS] += 1

    def set_capacity(self, granules: int) -> None:
        """A copy for readers; the truth is in the transaction."""
        self._header[_CAPACITY] = granules

    def header(self) -> U64:
        """A copy, for `counters_in`, `totals_in` and `handovers_in`."""
        return self._header.copy()

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """While counts move from a process's page into the header: who reads both looks again. Under the write lock
        only; a process that is killed meanwhile leaves the number odd for the next one."""
        self._header[_HANDOVERS] |= np.uint64(1)
        try:
            yield
        finally:
            self._header[_HANDOVERS] += np.uint64(1)

    def add_counters(self, deltas: dict[str, int]) -> None:
        for i, name in enumerate(_NAMED):
            if deltas.get(name):
                count = int(self._header[_FIRST_COUNTER + i]) + deltas[name]
                self._header[_FIRST_COUNTER + i] = count & 0xFFFFFFFFFFFFFFFF

    def _rows_at(self, slots: Slots) -> npt.NDArray[np.void]:
        return np.take(self.rows, slots, axis=0).reshape(-1).view(ROW_DTYPE)

    def present(self, keys: U8, space: int) -> Bools:
        """Whether each key is in the table, by its fingerprint (see `Cells.present`)."""
        return self.cells.present(hash_keys(keys, space))

    def present_one(self, key: bytes, space: int) -> bool:
        """Whether one key is in the table, by its full name."""
        for slot in self.cells.matches_one(hash_key(key, space)):
            at = slot * ROW_NBYTES
            if slot < self.max_pages and self._flat_rows[at : at + KEY_NBYTES] == key and self.space[slot] == space:
                return True
        return False

    def slots(self, keys: U8, space: int) -> list[int]:
        """The slot of each key, by its full name; -1 where it is absent."""
        which, candidates = self.cells.matches(hash_keys(keys, space))
        valid = candidates < np.uint64(self.max_pages)
        which, slots = which[valid], candidates[valid].astype(np.int64)
        rows = self._rows_at(slots)
        words = rows.view("<u8").reshape(-1, ROW_NBYTES // 8)[:, : KEY_NBYTES // 8]
        same = (words == keys.view("<u8")[which]).all(axis=1) & (rows["space"] == space)
        found = np.full(len(keys), -1, dtype=np.int64)
        found[which[same]] = slots[same]
        of_each: list[int] = found.tolist()
        return of_each

    def at(self, slot: int, key: bytes, space: int) -> Found | None:
        """What slot holds, if it is this page and whole."""
        found = self.any_at(slot)
        return found if found is not None and found.row.key == key and found.row.space == space else None

    def any_at(self, slot: int) -> Found | None:
        """Whatever page is at slot."""
        raw = self.rows[slot].tobytes()
        row = Row.decode(raw)
        return None if row is None else Found(slot, raw, row)

    def check(self, slots: Sequence[int]) -> None:
        """Raises Damaged where a slot should hold a page and its row is none. Under the write lock only."""
        for slot in slots:
            if self.granules[slot] and Row.decode(self.rows[slot].tobytes()) is None:
                raise Damaged(f"the row of the page at slot {slot} does not match its checksum")

    def created(self, slots: Slots) -> U32:
        """Unix time in seconds at which the pages at `slots` were stored."""
        created: U32 = self._rows_at(slots)["created"]
        return created

    def generations(self, slots: Slots) -> U64:
        """Of the pages at `slots`; 0 where there is none."""
        generations: U64 = self._rows_at(slots)["generation"].astype(np.uint64)
        return generations

    def titles(self, slots: Slots) -> list[tuple[bytes, int, int]]:
        """Key, space and size of each page at `slots`, but for those that are gone."""
        rows = self._rows_at(slots)
        rows = rows[rows["generation"] != 0]
        columns = map(bytes, rows["key"]), rows["space"].tolist(), rows["nbytes"].tolist()
        return list(zip(*columns, strict=True))

    def marked(self, slots: Sequence[int], mark: int) -> list[bool]:
        """Whether each page carries the mark; False for a slot of -1."""
        at = np.asarray(slots, dtype=np.int64)
        carries = (at >= 0) & ((self.access[at] & np.uint64(mark)) != 0)
        found: list[bool] = carries.tolist()
        return found

    def unchanged(self, found: Found) -> bool:
        """True if the page is still where it was found, so that what was read in between are its bytes."""
        return self.rows[found.slot].tobytes() == found.raw

    def touch(self, slots: Sequence[int], mark: int = 0, *, use: bool = False) -> None:
        """Note that these pages were used now, and mark them. `use`: for what they hold, which is counted."""
        at = np.asarray(slots, dtype=np.int64)
        now, before = now_ns(), self.access[at]
        kept = before & np.uint64(_HINTS)
        if use:
            again = now - before.view(np.int64) > USES_APART_NS
            kept += np.uint64(_USE) * (again & (kept < _USES))
        self.access[at] = kept | np.uint64(now & ~_HINTS | mark)

    @property
    def last_uses(self) -> U64:
        """The time of last use of each page: a copy, without what else is noted in `access`."""
        return self.used_at(self.access)

    @staticmethod
    def used_at(access: U64) -> U64:
        """The times of last use, out of `access`."""
        return access & ~np.uint64(_HINTS)

    def uses(self, access: U64) -> U8:
        """How often each page was used since it was stored, from its time of last use; at most MOST_USES."""
        uses: U8 = (access.astype(np.uint8) >> np.uint8(2)) & np.uint8(MOST_USES)
        return uses

    def set_uses(self, slots: Slots, uses: U8) -> None:
        kept = self.access[slots] & ~np.uint64(_USES)
        self.access[slots] = kept | uses.astype(np.uint64) << np.uint64(2)

    @property
    def eviction(self) -> int:
        """Number of the pool's eviction policy."""
        return int(self._header[_EVICTION])

    def set_eviction(self, number: int) -> None:
        """Under the write lock only."""
        self._header[_EVICTION] = number

    def begin_counting_uses(self) -> None:
        """In a pool of a version that counted none, take what stands in their place away. Under the write lock only."""
        if not self._header[_COUNTS_USES]:
            self.access &= ~np.uint64(_USES)
            self._header[_COUNTS_USES] = 1

    def backdate(self, slots: Sequence[int], used_ns: Sequence[int]) -> None:
        """Note that these pages were last used then, and take their marks and uses away."""
        when = np.asarray(used_ns, dtype=np.uint64)
        self.access[np.asarray(slots, dtype=np.int64)] = when & ~np.uint64(_HINTS)

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
            self.access[slots] = accessed_ns & ~_HINTS
            self.rows[slots] = record.set_rows
            self.granules[slots] = rows["granules"]
            self._words[record.set_cells] = record.set_words
        self._header[_PAGES] = record.pages
        self._header[_USED] = record.used_granules
        self._header[_APPLIED] = record.number

    def hashes_of(self, slots: U32 | Slots) -> U64:
        """Of the names of the pages at `slots`."""
        rows = self._rows_at(slots.astype(np.int64))
        return hash_keys(rows["key"], rows["space"].astype(np.uint64))

    def count_names(self) -> int:
        """Cells in use: as many as pages."""
        return int(np.count_nonzero(self._words))

    def slots_beyond(self, limit: int) -> tuple[Slots, list[int]]:
        """Slots of pages with space beyond granule `limit`, as far as their rows say, and of those whose extents are
        listed elsewhere."""
        live = self.live_slots()
        beyond = np.zeros(len(live), dtype=np.bool_)
        listed: list[int] = []
        for at in range(0, len(live), _ROWS_AT_ONCE):
            slots = live[at : at + _ROWS_AT_ONCE]
            rows = self._rows_at(slots)
            ends = rows["extents"].astype(np.int64).reshape(len(slots), -1, 2).sum(axis=2)
            beyond[at : at + len(slots)] = (ends > limit).any(axis=1)
            listed += slots[rows["num_extents"] > INLINE_EXTENTS].tolist()
        return live[beyond], listed

    def live_slots(self) -> Slots:
        """Slots that hold a page. NumPy searches a copy: it goes over what it searches twice, and raises where another
        process changed it in between."""
        return np.flatnonzero(self.granules != 0)

    def end_of_slots(self) -> int:
        """Behind the last slot that holds a page: low ones are taken first, so most tables are empty from there on."""
        slots = self.live_slots()
        return int(slots[-1]) + 1 if len(slots) else 0
