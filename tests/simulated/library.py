"""A library that reads as NIXL and Mooncake do: it cannot be called back, and writes when it likes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from simulated.cuda_driver import LIBRARY, SealedBuffer

from transfer.control.handshake import Identity
from transfer.transports.base import Numbers, Region, TransferError
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.libraries.reader import Reader
from transfer.transports.libraries.transport import LibraryTransport
from transfer.transports.memory import Memory
from transfer.transports.vectors import Vector, read_process


class MemoryReader(Reader):
    """Reads another process's memory; a test may set what happens before."""

    def __init__(self) -> None:
        self.offered: list[Region] = []
        self.staged: list[int] = []
        self.met: list[str] = []
        self.refused: set[int] = set()
        """Addresses that cannot be registered."""
        self.before: Callable[[], None] = lambda: None
        self.is_closed = False

    def offer(self, region: Region) -> None:
        if region.address in self.refused:
            raise TransferError("the library has no room for it")
        self.offered.append(region)

    def withdraw(self, region: Region) -> None:
        self.offered.remove(region)

    def origin(self) -> bytes:
        return f"{os.getpid()}".encode()

    def stage(self, address: int, nbytes: int) -> None:
        self.staged.append(address)

    def meet(self, origin: bytes) -> str:
        if not origin.isdigit():
            raise TransferError("no number of a process")
        self.met.append(origin.decode())
        return origin.decode()

    def part(self, name: str) -> None:
        self.met.remove(name)

    def read(self, name: str, remote: Numbers, local: Numbers, nbytes: Numbers) -> None:
        self.before()
        source, target = (Vector.of(np.asarray(column), np.asarray(nbytes)) for column in (remote, local))
        try:
            while target.left:
                read_process(int(name), source, target)
        except OSError as error:
            raise TransferError(str(error)) from error

    def close(self) -> None:
        self.is_closed = True


class SimulatedTransport(LibraryTransport):
    """See the module."""

    name = "simulated_library"

    def _load(self, hosts: Sequence[str]) -> Reader:
        self.library = MemoryReader()
        return self.library


class StagedLibrary(SimulatedTransport):
    """The same for memory of a device, of a stand-in for the driver."""

    buffer = SealedBuffer

    def __init__(self, memory: Memory, identity: Identity | None = None, **options: Any) -> None:
        super().__init__(memory, identity, place=OnDevice(Driver(LIBRARY), 0), **options)


class Gate:
    """Holds what goes through it until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.reached.release()
        assert self._open.wait(120)

    def open(self) -> None:
        self._open.set()
