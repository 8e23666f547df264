"""Page-locked memory between a device and what moves bytes of the host, with a stream that copies to or from it."""

from __future__ import annotations

import contextlib
import ctypes
import queue
from dataclasses import dataclass

import numpy as np

from transfer.transports.base import Int64, Region, Transport
from transfer.transports.cuda.copier import Copier
from transfer.transports.cuda.driver import CudaError, Driver
from transfer.transports.memory import Memory
from transfer.transports.vectors import Pieces

STAGE_NBYTES = 4 << 20
"""Moved at a time: while one such part is copied by the device, the next or the last one is on its way."""
NUM_STAGES = 3
"""Of a peer, at either side: one is gathered, one is sent, and one waits for its answer; two are filled, while the
device empties the third. Each further path, or lane, has `MORE_STAGES`: else most would have nothing to carry. A sender
goes without these where they are not to be had; a receiver fills `NUM_STAGES` of one lane at most, also where nothing
comes over the others."""
MORE_STAGES = 2


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Where the memory of a process is that its transports serve."""

    driver: Driver
    device: int


class Stage:
    """One part's worth of it. For one thread at a time."""

    def __init__(self, place: OnDevice, nbytes: int = STAGE_NBYTES) -> None:
        """Raises CudaError."""
        self.nbytes = nbytes
        self._place = place
        self._copier = Copier(place.driver, place.device)
        try:
            self.address = place.driver.lock_pages(place.device, nbytes)
        except CudaError:
            self._copier.close()
            raise

    def gather(self, part: Pieces) -> None:
        """Bring these pieces of the device here, one after the other; wait for it. Raises CudaError."""
        here, _, sizes = self.packed(part)
        self._copier.run(self._copier.plan(np.asarray(part.local, dtype=np.int64), here, sizes))

    def packed(self, part: Pieces) -> tuple[Int64, Int64, Int64]:
        """The same pieces as they lie here once they were gathered: (here, there, sizes)."""
        sizes = np.asarray(part.nbytes, dtype=np.int64)
        return self.address + sizes.cumsum() - sizes, np.asarray(part.remote, dtype=np.int64), sizes

    def view(self, nbytes: int) -> memoryview:
        """The first bytes that lie here; valid until others do."""
        return memoryview((ctypes.c_char * nbytes).from_address(self.address))

    def begin_scatter(self, part: Pieces) -> None:
        """Have what lies here copied to these pieces of the device; nothing is under way if it raises CudaError."""
        self._copier.begin(self._copier.plan(*self.packed(part)))

    def wait(self) -> None:
        """Until what was begun is over. Raises CudaError: then nothing more of it happens."""
        self._copier.wait()

    def close(self) -> None:
        """Give it back; nothing may be under way."""
        with contextlib.suppress(CudaError):  # a device that failed gives nothing back
            self._copier.close()
            self._place.driver.unlock_pages(self._place.device, self.address)


class Stages:
    """As many as are in use at a time, kept for the next use. Safe to use from any thread.

    Args:
        memory: where they are registered, which are sent from.
        filled_by: the transport that is told of them, which fetches into them.
    """

    def __init__(self, place: OnDevice, memory: Memory | None = None, filled_by: Transport | None = None) -> None:
        self._place, self._memory, self._filled_by = place, memory, filled_by
        self._free: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self._regions: list[Region] = []

    def take(self) -> Stage:
        """Raises CudaError, and what `Transport.register` does."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            stage = Stage(self._place)
        if self._memory is not None:
            self._regions.append(self._memory.register(stage.address, stage.nbytes, is_stage=True))
        elif self._filled_by is not None:  # past the memory, whose lock may wait for what the receiving thread does
            region = Region(stage.address, stage.nbytes, is_stage=True)
            try:
                self._filled_by.register(region)
            except BaseException:
                stage.close()
                raise
            self._regions.append(region)
        return stage

    def give_back(self, stage: Stage) -> None:
        """Nothing reads or fills it any more."""
        self._free.put(stage)

    def close(self) -> None:
        """All must have been given back. May be called twice."""
        while self._regions:
            owner = self._memory or self._filled_by
            assert owner is not None
            owner.unregister(self._regions.pop())
        while not self._free.empty():
            self._free.get_nowait().close()
