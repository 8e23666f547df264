"""Reads by a library that cannot be called back: into staging, and scattered once they are complete.

What an order names is copied to its place while its grant is held, which one that is revoked cannot be, so revoking
holds whatever the library still does. Staging of a read that failed may be written at any time: it is never used again.
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
from transfer.transports.vectors import Pieces, copy_out
from transfer.transports.wire import MAX_ORDER_PIECES, CopyStatus

logger = get_logger(__name__)

SLOT_NBYTES = 4 << 20
"""What is larger has left the processor's cache before it is copied out; what is smaller takes more calls of the
library. A marked order has no more than this: see `_Order`."""
NUM_WORKERS = 2
"""Of a peer: one waits for the library while the other scatters what has come."""
_MIN_PART_NBYTES = 1 << 20
"""Of an order of which each worker has a share."""


class Slot:
    """Memory for what is read at once."""

    def __init__(self, reader: Reader) -> None:
        """Raises TransferError, OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared keeps its pages when it is condemned
        self._map = mmap.mmap(-1, SLOT_NBYTES, flags=flags)
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


class _Writer:
    """A worker while it writes granted memory, for some milliseconds: with the lock taken and the grant held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def cancel(self) -> None:
        """See `memory.Holder`: it is over soon."""

    cut_off = cancel


class _Order:
    """What is left of one, of which each worker takes a part at a time.

    A marked one is read at once, since its bytes are looked at in their order; no sender marks one that is longer.
    """

    def __init__(self, fetch: Fetch) -> None:
        pieces, most = fetch.pieces, SLOT_NBYTES
        if fetch.passing is None:
            most = min(most, max(-(-pieces.total // NUM_WORKERS), _MIN_PART_NBYTES))
        self.fetch = fetch
        self.parts = pieces.slices(most, MAX_ORDER_PIECES)
        self.passing = fetch.passing if pieces.total <= most else None
        self.to_begin = self.to_end = pieces.total
        """Bytes."""
        self.status = CopyStatus.OK
        """Of the parts that are over."""


class StagedFetcher(Fetcher):
    """Fetches from one peer, in threads of its own."""

    is_stepwise = True  # it holds the grant itself, for each step
    max_under_way = 8

    def __init__(self, name: str, reader: Reader, staging: Staging, stages: Stages | None = None) -> None:
        """`stages` are for granted memory that is on a device."""
        self._name, self._reader, self._staging, self._stages = name, reader, staging, stages
        self._waiting: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._is_closed = False
        self._workers: list[threading.Thread] = []
        self._writers: list[_Writer] = []
        self._meeting = threading.Lock()
        """Guards what follows."""
        self._names: dict[bytes, str] = {}
        """Of what the peer said of itself, which changes with what it has registered."""
        self._num_ended = 0
        self._landing = threading.Lock()
        """So that one stage is enough."""
        self._counting = threading.Lock()
        """Guards what is left of orders."""

    def start(self, fetch: Fetch) -> CopyStatus | None:
        while len(self._workers) < NUM_WORKERS:
            writer = _Writer()
            worker = threading.Thread(
                target=self._work, args=(writer,), name=f"mooncake-{self._name}-read", daemon=True
            )
            worker.start()
            self._workers.append(worker)
            self._writers.append(writer)
        self._waiting.put(_Order(fetch))
        return None

    def close(self) -> None:
        self._is_closed = True
        for writer in self._writers:
            with writer.lock:
                self._waiting.put(None)

    def _work(self, writer: _Writer) -> None:
        while (order := self._waiting.get()) is not None:
            part = next(order.parts)
            order.to_begin -= part.total
            if order.to_begin:  # behind others: each has its turn
                self._waiting.put(order)
            status = order.status
            if status is CopyStatus.OK:
                status = self._fetch(order, part, writer)
            with self._counting:
                order.to_end -= part.total
                is_over = not order.to_end
                if status is not CopyStatus.OK:
                    order.status = status
            if is_over:
                order.fetch.done(order.status)
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

    def _fetch(self, order: _Order, part: Pieces, writer: _Writer) -> CopyStatus:
        if not self._is_wanted(order.fetch):
            return CopyStatus.NO_GRANT
        try:
            return self._read(order, part, writer)
        except Exception as error:  # also a library's own must not end the thread
            log_once(
                f"transfer.{self._name}:{type(error).__name__}:{kind_of(str(error))}",
                "%s: a peer's memory could not be read: %s", self._name, error, logger=logger,
                exc_info=not isinstance(error, (TransferError, OSError)),
            )  # fmt: skip
            return CopyStatus.UNREADABLE

    def _read(self, order: _Order, part: Pieces, writer: _Writer) -> CopyStatus:
        name = self._source(order.fetch.attachment)
        slot = self._staging.take()
        try:
            sizes: Int64 = np.asarray(part.nbytes, dtype=np.int64)
            self._reader.read(name, part.local, slot.address + sizes.cumsum() - sizes, part.nbytes)
        except BaseException:
            self._staging.condemn(slot)
            raise
        try:
            with writer.lock:
                return self._scatter(order, part, slot, writer)
        finally:
            self._staging.give_back(slot)

    def _scatter(self, order: _Order, part: Pieces, slot: Slot, writer: _Writer) -> CopyStatus:
        held = order.fetch.held
        if held is None or not self._is_wanted(order.fetch):
            return CopyStatus.NO_GRANT
        if self._stages is not None:
            with self._landing:
                return land(self._stages, slot.address, [part.remote, part.nbytes], held, order.passing)
        if not held.hold(writer):  # its lock would let only one worker copy
            return CopyStatus.NO_GRANT
        try:
            copy_out(slot.address, part.remote, part.nbytes)
        finally:
            held.let_go(writer)
        return CopyStatus.OK

    def _source(self, origin: bytes) -> str:
        with self._meeting:
            if origin not in self._names:
                self._names[origin] = self._reader.meet(origin)
            return self._names[origin]
