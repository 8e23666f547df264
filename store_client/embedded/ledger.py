"""The ledger: one small LMDB per pool with everything that must change together or not at all.

Free space, free slots, reservations of live writers, long extent lists, and the redo record of the page table. Only the
holder of the pool's write lock opens a transaction, so LMDB runs without its own locks: it has no reader that a
killed or stopped process could leave behind, and nothing in it depends on a PID.

A redo record is committed with its transaction, then applied to the page table, then told in the feed. What a writer
that was killed in between has left undone, the next one does first.
"""

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from store_client.embedded.allocator import FreeRuns, Runs, as_runs, clip_runs
from store_client.embedded.faults import Damaged
from store_client.embedded.feed import Feed
from store_client.embedded.redo import Record
from store_client.embedded.table import Table, now_ns

_META = struct.Struct("<QQII")
_FREE, _SLOTS, _KEY_META, _KEY_RECORD = b"free", b"slots", b"meta", b"journal"
_RESERVATION, _EXTENTS = b"r", b"x"
"""First bytes of many keys: no other key may begin with one of them."""
_RUN_COUNTS = struct.Struct("<II")


def map_nbytes(max_pages: int) -> int:
    """Size of the LMDB file: a base, and 48 bytes a page for free runs at their most fragmented and records."""
    return -(-((4 << 20) + 48 * max_pages) // 4096) * 4096


@dataclass(frozen=True, slots=True)
class Reservation:
    """Space and slots that a writer holds until it commits or dies."""

    owner: bytes
    number: int
    space_runs: Runs
    slot_runs: Runs

    @property
    def key(self) -> bytes:
        return _RESERVATION + self.owner + struct.pack(">Q", self.number)

    def encode(self) -> bytes:
        counts = _RUN_COUNTS.pack(len(self.space_runs), len(self.slot_runs))
        return counts + self.space_runs.astype("<u4").tobytes() + self.slot_runs.astype("<u4").tobytes()


def _decode_reservation(key: bytes, value: bytes) -> Reservation:
    num_space, num_slots = _RUN_COUNTS.unpack_from(value)
    words = np.frombuffer(value, dtype="<u4", offset=_RUN_COUNTS.size).reshape(-1, 2)
    if len(words) != num_space + num_slots:
        raise lmdb.CorruptedError(f"reservation {key.hex()} has {len(words)} runs, announced {num_space + num_slots}")
    return Reservation(key[1:17], struct.unpack(">Q", key[17:])[0], words[:num_space], words[num_space:])


def _get(txn: lmdb.Transaction, key: bytes) -> bytes:
    value = txn.get(key)
    if value is None:
        raise lmdb.CorruptedError(f"the ledger has no {key.decode()}")
    return bytes(value)


class Draft:
    """A transaction under way: the state as it is, to be changed in place."""

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn
        number, generation, high_water, capacity = _META.unpack(_get(txn, _KEY_META))
        self.number = number
        """Of the last redo record."""
        self.generation = generation
        """Last one given to a page or a reservation."""
        self.high_water = high_water
        """Granules of the arena that are secured."""
        self.capacity = capacity
        """Granules of the arena that may be."""
        self.record: Record | None = None
        """What to change in the page table with this transaction."""
        self._free: FreeRuns | None = None
        self._slots: FreeRuns | None = None

    @property
    def free(self) -> FreeRuns:
        if self._free is None:
            self._free = FreeRuns.from_bytes(_get(self._txn, _FREE))
        return self._free

    @property
    def slots(self) -> FreeRuns:
        if self._slots is None:
            self._slots = FreeRuns.from_bytes(_get(self._txn, _SLOTS))
        return self._slots

    def next_generation(self, count: int = 1) -> int:
        """The first of so many."""
        self.generation += count
        return self.generation - count + 1

    def reserve(self, reservation: Reservation) -> None:
        self._txn.put(reservation.key, reservation.encode())

    def release(self, reservation: Reservation) -> bool:
        """Drop the reservation; False if it is gone already, and its space with it."""
        return bool(self._txn.delete(reservation.key))

    def reservations(self) -> list[Reservation]:
        cursor = self._txn.cursor()
        found = []
        if cursor.set_range(_RESERVATION):
            for key, value in cursor:
                if key[:1] != _RESERVATION or len(key) != 25:
                    break
                found.append(_decode_reservation(bytes(key), bytes(value)))
        return found

    def put_extents(self, slot: int, extents: Runs) -> None:
        """Keep the extents of a page that has more than fit into its row."""
        self._txn.put(_EXTENTS + struct.pack(">I", slot), extents.astype("<u4").tobytes())

    def pop_extents(self, slot: int) -> Runs:
        blob = self._txn.pop(_EXTENTS + struct.pack(">I", slot))
        return np.frombuffer(blob or b"", dtype="<u4").reshape(-1, 2)

    def peek_extents(self, slot: int) -> Runs:
        blob = self._txn.get(_EXTENTS + struct.pack(">I", slot))
        return np.frombuffer(blob or b"", dtype="<u4").reshape(-1, 2)

    def last_record(self) -> Record | None:
        blob = self._txn.get(_KEY_RECORD)
        return Record.decode(bytes(blob)) if blob else None

    def store(self) -> None:
        """Write everything that changed into the transaction."""
        if self._free is not None:
            self._txn.put(_FREE, self._free.to_bytes())
        if self._slots is not None:
            self._txn.put(_SLOTS, self._slots.to_bytes())
        if self.record is not None:
            self.number = self.record.number
            self._txn.put(_KEY_RECORD, self.record.encode())
        self._txn.put(_KEY_META, _META.pack(self.number, self.generation, self.high_water, self.capacity))


class _Gate:
    """Held by threads while they are inside LMDB, and by a fork.

    Closing an environment waits for the threads that are inside, which a forked child does not have.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self._depth -= 1
        self._lock.release()

    def shut(self, timeout_s: float) -> bool:
        """Wait until nobody is inside and keep it so; False where a thread stays inside, or is the caller itself."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        if self._depth:
            self._lock.release()
            return False
        return True

    def open(self) -> None:
        self._lock.release()


class Ledger:
    """The LMDB environment, and the page table and feed that follow it. All for the holder of the write lock."""

    def __init__(self, folder: Path, table: Table, feed: Feed) -> None:
        self._table, self._feed = table, feed
        self._abandoned = False
        with _gate:
            self._env = lmdb.open(
                os.fspath(folder), map_size=map_nbytes(table.max_pages), lock=False, writemap=True, sync=False,
                metasync=False, max_spare_txns=0, create=True, mode=0o600,
            )  # fmt: skip
        _ledgers.add(self)

    @contextmanager
    def transaction(self) -> Iterator[Draft]:
        """Commits at the end of the block, and nothing of it if the block raises. Raises lmdb.Error.

        A redo record (see `record`) is committed with it, and carried out after.
        """
        with _gate, self._env.begin(write=True) as txn:
            draft = Draft(txn)
            yield draft
            if self._abandoned:
                raise lmdb.Error("this process was forked within a transaction, which is its parent's")
            record = draft.record
            if record is not None:
                gone = np.take(self._table.rows, record.clear_slots, axis=0)
                self._feed.prepare(record.number, gone, record.set_rows)
            draft.store()
        if record is not None:
            self._carry_out(record)

    def record(self, draft: Draft, pages: int, granules: int, **changes: np.ndarray) -> None:
        """Give the transaction a redo record with these changes; `pages` and `granules` are what they add."""
        table = self._table
        draft.record = Record(draft.number + 1, table.pages + pages, table.used_granules + granules, **changes)

    def _carry_out(self, record: Record) -> None:
        self._table.apply(record, now_ns())
        self._feed.publish(record.number)

    @contextmanager
    def peek(self) -> Iterator[Draft]:
        """As `transaction`, but changes nothing."""
        with _gate, self._env.begin() as txn:
            yield Draft(txn)

    def found(self, capacity: int) -> None:
        """Write the state of an empty pool of `capacity` granules."""
        with self._env.begin(write=True) as txn:
            txn.put(_KEY_META, _META.pack(0, 0, 0, capacity))
            txn.put(_FREE, b"")
            txn.put(_SLOTS, FreeRuns(np.array([[0, self._table.max_pages]], dtype=np.uint32)).to_bytes())

    def catch_up(self, draft: Draft) -> None:
        """Carry out what was committed. Raises Damaged where ledger, page table and feed cannot belong together."""
        table, told = self._table, self._feed.told
        if draft.number - table.applied not in (0, 1):
            raise Damaged(f"its page table is at change {table.applied}, its ledger at {draft.number}")
        if table.pages > table.max_pages or table.used_granules > max(draft.high_water, draft.capacity):
            raise Damaged(f"it counts {table.pages} pages in {table.used_granules} granules")
        if draft.number - told not in (0, 1) or told > table.applied:
            raise Damaged(f"its feed is at change {told}, its ledger at {draft.number}")
        if draft.number != told:
            record = draft.last_record()
            if record is not None:
                self._carry_out(record)

    def unsound(self, arena_granules: int) -> str | None:
        """What does not add up between ledger and page table, or None: each granule of the arena and each slot of the
        table is exactly one owner's.

        Looks at sums only: whatever gives space to two owners, or to none, puts them out, and every later change keeps
        the difference. Costs a look at two columns of the table.
        """
        table = self._table
        with self.peek() as draft:
            held = draft.reservations()
            space = as_runs(run for reservation in held for run in reservation.space_runs.tolist())
            slots = as_runs(run for reservation in held for run in reservation.slot_runs.tolist())
            reserved = int(clip_runs(space, draft.high_water)[0][:, 1].sum(dtype=np.int64))
            if draft.capacity > arena_granules:
                return f"its arena has {arena_granules} granules and should have {draft.capacity}"
            if draft.high_water > draft.capacity:
                return f"{draft.high_water} granules are in use, its capacity is {draft.capacity}"
            if not (draft.free.is_sound(draft.high_water) and draft.slots.is_sound(table.max_pages)):
                return "its free space is listed twice, or lies outside"
            sums = {
                "granules": (draft.free.total + table.used_granules + reserved, draft.high_water),
                "slots": (draft.slots.total + table.pages + int(slots[:, 1].sum(dtype=np.int64)), table.max_pages),
                "granules of pages": (int(table.granules.sum(dtype=np.int64)), table.used_granules),
                "pages": (int(np.count_nonzero(table.granules)), table.pages),
                "names": (table.count_names(), table.pages),
            }
        wrong = [f"{seen} {what} instead of {expected}" for what, (seen, expected) in sums.items() if seen != expected]
        return f"it accounts for {', '.join(wrong)}" if wrong else None

    def close(self) -> None:
        with _gate:
            self._env.close()

    def abandon_in_child(self, nobody_inside: bool) -> None:
        """After a fork: unmap the child's copy, which frees the file for an opening of the child's own.

        Where a thread of the parent was inside LMDB the copy is never closed, not at the child's end either.
        """
        self._abandoned = True
        if nobody_inside:
            self._env.close()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._env))


_FORK_WAIT_S = 5.0
"""Longest delay of a fork; a transaction takes about a millisecond."""

_gate = _Gate()
_fork = threading.local()
_ledgers: "weakref.WeakSet[Ledger]" = weakref.WeakSet()


def _before_fork() -> None:
    _fork.nobody_inside = _gate.shut(_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    if _fork.nobody_inside:
        _gate.open()


def _after_fork_in_child() -> None:
    global _gate
    _gate = _Gate()
    for ledger in list(_ledgers):
        ledger.abandon_in_child(_fork.nobody_inside)
    _ledgers.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
