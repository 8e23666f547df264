"""What a library has to offer: reads of registered memory of another process, into memory of this one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from transfer.transports.base import Numbers, Region, TransferError

READ_S = 30.0
"""An order that takes longer has failed: some MiB, of a peer that answers."""


class Reader(ABC):
    """A library, for one transport. Safe to use from any thread."""

    @abstractmethod
    def offer(self, region: Region) -> None:
        """Let peers that know the `origin` read this memory. Raises TransferError."""

    @abstractmethod
    def withdraw(self, region: Region) -> None:
        """Once this returned, the library reads it in this process no more."""

    @abstractmethod
    def origin(self) -> bytes:
        """What a peer has to know to read what is offered now. Raises TransferError."""

    @abstractmethod
    def stage(self, address: int, nbytes: int) -> None:
        """Make memory of this process ready to be read into, until `close`. Raises TransferError."""

    @abstractmethod
    def meet(self, origin: bytes) -> str:
        """The name of who said this, for `read`, until as many calls of `part`. Raises TransferError."""

    @abstractmethod
    def part(self, name: str) -> None:
        """Nothing is read from there any more."""

    @abstractmethod
    def read(self, name: str, remote: Numbers, local: Numbers, nbytes: Numbers) -> None:
        """Copy `nbytes[i]` bytes from `remote[i]`, there, to `local[i]`, which is staged, for every i; wait for it.

        Raises TransferError where not all of it is there within `READ_S`. The library may still write then.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Nothing is read or written any more, and nothing is called any more."""


class Patience:
    """Between two looks at one read: none for `spin_s`, since a small one is soon over, then some, for others' sake."""

    def __init__(self, library: str, *, spin_s: float, max_pause_s: float) -> None:
        self._library, self._spin_s, self._max_pause_s = library, spin_s, max_pause_s
        self._began_at = time.monotonic()

    def wait(self) -> None:
        """Raises TransferError where the read has taken `READ_S`."""
        taken_s = time.monotonic() - self._began_at
        if taken_s > READ_S:
            raise TransferError(f"{self._library} has not read an order within {READ_S:g} s")
        time.sleep(0 if taken_s < self._spin_s else min(taken_s / 4, self._max_pause_s))
