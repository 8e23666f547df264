"""The ledger: one small LMDB per pool with everything that must change together or not at all.

Free space, free slots, reservations of live writers, long extent lists, and the redo record of the page table. Only the
holder of the pool's write lock opens a transaction, so LMDB runs without its own locks: it has no reader that a
killed or stopped process could leave behind, and nothing in it depends on a PID.
"""

import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from store_client.embedded import journal
from store_client.embedded.extents import FreeRuns, Runs
from store_client.embedded.journal import Record

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

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

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
        return journal.decode(bytes(blob)) if blob else None

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
    """The LMDB environment. Everything here is for the holder of the write lock."""

    def __init__(self, folder: Path, max_pages: int) -> None:
        self._abandoned = False
        with _gate:
            self._env = lmdb.open(
                os.fspath(folder), map_size=map_nbytes(max_pages), lock=False, writemap=True, sync=False,
                metasync=False, max_spare_txns=0, create=True, mode=0o600,
            )  # fmt: skip
        _ledgers.add(self)

    @contextmanager
    def transaction(self, prepare: Callable[[Record], None] | None = None) -> Iterator[Draft]:
        """Commits at the end of the block, and nothing of it if the block raises. Raises lmdb.Error.

        `prepare` is given the redo record, if there is one, right before the commit.
        """
        with _gate, self._env.begin(write=True) as txn:
            draft = Draft(txn)
            yield draft
            if self._abandoned:
                raise lmdb.Error("this process was forked within a transaction, which is its parent's")
            if prepare is not None and draft.record is not None:
                prepare(draft.record)
            draft.store()

    @contextmanager
    def peek(self) -> Iterator[Draft]:
        """As `transaction`, but changes nothing."""
        with _gate, self._env.begin() as txn:
            yield Draft(txn)

    def found(self, max_pages: int, capacity: int) -> None:
        """Write the state of an empty pool of `capacity` granules."""
        with self._env.begin(write=True) as txn:
            txn.put(_KEY_META, _META.pack(0, 0, 0, capacity))
            txn.put(_FREE, b"")
            txn.put(_SLOTS, FreeRuns(np.array([[0, max_pages]], dtype=np.uint32)).to_bytes())

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
