"""Reads by a library that cannot be called back: into staging, and scattered once they are complete.

What an order names is copied to its place under the lock of its grant and while that is not revoked, so revoking holds
whatever the library still does. Staging of a read that failed may be written at any time: it is never used again.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import threading

import numpy as np

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.transports.base import Int64, TransferError
from transfer.transports.cuda.landing import land
from transfer.transports.cuda.stage import Stages
from transfer.transports.libraries.reader import Reader
from transfer.transports.pull import Fetch, Fetcher
from transfer.transports.vectors import copy_out
from transfer.transports.wire import CopyStatus

logger = get_logger(__name__)

SLOT_NBYTES = 8 << 20
NUM_WORKERS = 2
"""Of a peer: one waits for the library while the other scatters what has come."""


class Slot:
    """Memory for one order."""

    def __init__(self, reader: Reader) -> None:
        """Raises TransferError, OSError."""
        self._map = mmap.mmap(-1, SLOT_NBYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        reader.stage(self.address, SLOT_NBYTES)

    def condemn(self) -> None:
        """Give its pages back; what is written to it after all gets other ones. Its addresses stay taken."""
        self._map.madvise(mmap.MADV_DONTNEED)


class Staging:
    """Slots of all peers of a transport: as many as are in use at a time. Safe to use from any thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._condemned: list[Slot] = []

    def take(self) -> Slot:
        """Raises TransferError, OSError."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return Slot(self._reader)

    def give_back(self, slot: Slot) -> None:
        """Nothing writes to it any more."""
        self._free.put(slot)

    def condemn(self, slot: Slot) -> None:
        """Something may."""
        slot.condemn()
        self._condemned.append(slot)


class StagedFetcher(Fetcher):
    """Fetches from one peer, in threads of its own."""

    is_stepwise = True  # it writes under the grant's lock, though not in the receiving thread
    max_under_way = 8

    def __init__(self, name: str, reader: Reader, staging: Staging, stages: Stages | None = None) -> None:
        """`stages` are for granted memory that is on a device."""
        self._name, self._reader, self._staging, self._stages = name, reader, staging, stages
        self._waiting: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._writing = threading.Lock()
        """Held while granted memory is written."""
        self._is_closed = False
        self._workers: list[threading.Thread] = []
        self._meeting = threading.Lock()
        """Guards what follows."""
        self._names: dict[bytes, str] = {}
        """Of what the peer said of itself, which changes with what it has registered."""
        self._num_ended = 0

    def start(self, fetch: Fetch) -> CopyStatus | None:
        if len(self._workers) < NUM_WORKERS:
            worker = threading.Thread(target=self._work, name=f"mooncake-{self._name}-read", daemon=True)
            worker.start()
            self._workers.append(worker)
        self._waiting.put(fetch)
        return None

    def close(self) -> None:
        with self._writing:
            self._is_closed = True
        for _ in self._workers:
            self._waiting.put(None)

    def _work(self) -> None:
        while (fetch := self._waiting.get()) is not None:
            fetch.done(self._fetch(fetch))
        self._end()

    def _end(self) -> None:
        with self._meeting:
            self._num_ended += 1
            if self._num_ended < len(self._workers):
                return
            names, self._names = self._names, {}
        for name in names.values():
            self._reader.part(name)

    def _is_wanted(self, fetch: Fetch) -> bool:
        return not self._is_closed and fetch.held is not None and not fetch.held.revoked

    def _fetch(self, fetch: Fetch) -> CopyStatus:
        if not self._is_wanted(fetch):
            return CopyStatus.NO_GRANT
        try:
            return self._read(fetch)
        except Exception as error:  # also a library's own must not end the thread
            log_once(
                f"transfer.{self._name}:{type(error).__name__}:{kind_of(str(error))}",
                "%s: a peer's memory could not be read: %s", self._name, error, logger=logger,
                exc_info=not isinstance(error, (TransferError, OSError)),
            )  # fmt: skip
            return CopyStatus.UNREADABLE

    def _read(self, fetch: Fetch) -> CopyStatus:
        pieces = fetch.pieces
        name = self._source(fetch.attachment)
        slot = self._staging.take()
        try:
            sizes: Int64 = np.asarray(pieces.nbytes, dtype=np.int64)
            self._reader.read(name, pieces.local, slot.address + sizes.cumsum() - sizes, pieces.nbytes)
        except BaseException:
            self._staging.condemn(slot)
            raise
        try:
            return self._scatter(fetch, slot)
        finally:
            self._staging.give_back(slot)

    def _scatter(self, fetch: Fetch, slot: Slot) -> CopyStatus:
        assert fetch.held is not None
        pieces = fetch.pieces
        with self._writing:
            if self._stages is not None and self._is_wanted(fetch):
                columns = [pieces.remote, pieces.nbytes]
                return land(self._stages, slot.address, columns, fetch.held, fetch.passing)
            with fetch.held.lock:
                if not self._is_wanted(fetch):
                    return CopyStatus.NO_GRANT
                copy_out(slot.address, pieces.remote, pieces.nbytes)
        return CopyStatus.OK

    def _source(self, origin: bytes) -> str:
        with self._meeting:
            if origin not in self._names:
                self._names[origin] = self._reader.meet(origin)
            return self._names[origin]
