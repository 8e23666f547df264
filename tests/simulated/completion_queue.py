"""Transports that pull as RDMA READ does: of registered memory only, with keys, and their ends come from a queue.

Reads are done by a thread of the receiver's, late and in any order, some of them at once. A key lies in a cell of the
sender's memory that is emptied when the region is unregistered, so a read of memory that is gone is noticed.
"""

from __future__ import annotations

import os
import random
import secrets
import threading
import time
from typing import Any, ClassVar

import numpy as np
from simulated.cuda_driver import LIBRARY, SealedBuffer

from transfer.control.handshake import Identity
from transfer.transports.base import Capabilities, Region, TransferError, first_outside
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.fetched import LandingFetcher
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.local import LocalTransport
from transfer.transports.memory import Memory
from transfer.transports.network import NetworkTransport
from transfer.transports.pull import Fetch, Fetcher, PullEncoder, PullTransport
from transfer.transports.vectors import IOV_MAX, Pieces, Vector, read_process
from transfer.transports.wire import CopyStatus

MAX_REGIONS = 256
STEP_NBYTES = 1 << 20
LATE_S = 0.002
_ROW = np.dtype([("address", "<i8"), ("nbytes", "<i8"), ("cell", "<i8"), ("key", "<u8"), ("pid", "<i8")])


class _Queue(PullTransport):
    """What both have in common."""

    max_nbytes = 4 << 20
    max_attached = MAX_REGIONS * _ROW.itemsize
    refused: ClassVar[set[int]] = set()
    """Addresses that cannot be registered."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.keys: dict[Region, Any] = {}
        self._emptied: list[Any] = []
        self.posted: list[tuple[Fetch, QueueFetcher]] = []
        self.changed = threading.Condition()
        self._closing = False
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def register(self, region: Region) -> None:
        if region.address in self.refused:
            raise TransferError("the card has no room for it")
        assert region not in self.keys
        self.keys[region] = np.array([secrets.randbits(63) + 1], dtype=np.uint64)

    def unregister(self, region: Region) -> None:
        cell = self.keys.pop(region)
        cell[0] = 0
        self._emptied.append(cell)

    def close(self) -> None:
        super().close()
        with self.changed:
            self._closing = True
            self.changed.notify()
        self._worker.join()
        assert not self.keys

    def is_registered(self, pieces: Pieces) -> bool:
        regions = sorted(self.keys, key=lambda region: region.address)
        starts = np.array([region.address for region in regions], dtype=np.int64)
        sizes = np.array([region.nbytes for region in regions], dtype=np.int64)
        return first_outside(np.asarray(pieces.remote), np.asarray(pieces.nbytes), starts, sizes) is None

    def _fetcher(self, connection: Any) -> Fetcher:
        return QueueFetcher(self)

    def _prepare(self, connection: Any, deadline_at: float) -> PullEncoder:
        return _KeyEncoder(self)

    def _work(self) -> None:
        draw = random.Random(0)
        while True:
            with self.changed:
                while not self.posted and not self._closing:
                    self.changed.wait()
                if not self.posted:
                    return
            time.sleep(draw.random() * LATE_S)  # others arrive meanwhile
            with self.changed:
                fetch, fetcher = self.posted.pop(draw.randrange(len(self.posted)))
            fetch.done(fetcher.read(fetch))


class QueueFetcher(Fetcher):
    """Posts reads of one peer's memory."""

    def __init__(self, transport: _Queue) -> None:
        self._transport = transport
        self._unwanted: set[Fetch] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._draw = random.Random(1)

    def start(self, fetch: Fetch) -> CopyStatus | None:
        if not self._transport.is_registered(fetch.pieces):
            return CopyStatus.UNREADABLE
        if self._draw.random() < 0.1 and fetch.pieces.total <= STEP_NBYTES:
            return self.read(fetch)
        with self._transport.changed:
            self._transport.posted.append((fetch, self))
            self._transport.changed.notify()
        return None

    def cancel(self, fetch: Fetch) -> None:
        self._unwanted.add(fetch)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def read(self, fetch: Fetch) -> CopyStatus:
        """All of it, unless nobody wants it any more."""
        try:
            for pieces in fetch.pieces.slices(STEP_NBYTES, IOV_MAX):
                with self._lock:
                    if self._is_closed or fetch in self._unwanted:
                        return CopyStatus.NO_GRANT
                    pid = _keyed(fetch.attachment, pieces)
                    if not pid:
                        return CopyStatus.UNREADABLE
                    source, target = Vector.of(pieces.local, pieces.nbytes), Vector.of(pieces.remote, pieces.nbytes)
                    while target.left:
                        read_process(pid, source, target)
        except OSError:
            return CopyStatus.UNREADABLE
        return CopyStatus.OK


class _KeyEncoder(PullEncoder):
    """Tells the keys of the regions that the pieces are in."""

    def __init__(self, transport: _Queue) -> None:
        super().__init__(transport.max_nbytes)
        self._transport = transport

    def attachment(self, pieces: Pieces) -> bytes:
        starts = np.asarray(pieces.local)
        rows = [
            (region.address, region.nbytes, cell.ctypes.data, int(cell[0]), os.getpid())
            for region, cell in sorted(self._transport.keys.items(), key=lambda item: item[0].address)
            if ((region.address <= starts) & (starts < region.address + region.nbytes)).any()
        ]
        return np.array(rows, dtype=_ROW).tobytes()


def _keyed(attachment: bytes, pieces: Pieces) -> int:
    """The process whose memory the pieces are, where the keys are still its own; else 0."""
    rows = np.frombuffer(attachment, _ROW)
    starts, sizes = rows["address"].astype(np.int64), rows["nbytes"].astype(np.int64)
    local = np.asarray(pieces.local)
    if first_outside(local, np.asarray(pieces.nbytes), starts, sizes) is not None:
        return 0
    for row in rows[np.unique(starts.searchsorted(local, side="right") - 1)]:
        seen = np.zeros(1, dtype=np.uint64)
        read_process(int(row["pid"]), Vector.of([int(row["cell"])], [8]), Vector.of([seen.ctypes.data], [8]))
        if int(seen[0]) != int(row["key"]):
            return 0
    return int(rows["pid"][0])


class QueueTransport(_Queue, LocalTransport):
    """Its orders go over Unix sockets."""

    name = "queue"
    capabilities = Capabilities(needs_registration=True)


class FarQueueTransport(_Queue, NetworkTransport):
    """Its orders go over TCP, as those of RDMA would; the reads do not leave this host."""

    name = "far_queue"
    capabilities = Capabilities(other_host=True, needs_registration=True)


class LongQueueTransport(QueueTransport):
    """Its orders are longer than a stage of a device's memory."""

    max_nbytes = 32 << 20


class StagedQueueTransport(LongQueueTransport):
    """Of memory of a device, over the stand-in: its fetches fill stages that it was told of."""

    buffer = SealedBuffer
    capabilities = Capabilities(device_memory=True, needs_registration=True)
    fills_stages = True

    def __init__(self, memory: Memory, identity: Identity | None = None, place: OnDevice | None = None) -> None:
        super().__init__(memory, identity, place or OnDevice(Driver(LIBRARY), 0))

    def _fetcher(self, connection: Any) -> Fetcher:
        assert self.stages is not None
        return LandingFetcher(super()._fetcher(connection), self.stages)
