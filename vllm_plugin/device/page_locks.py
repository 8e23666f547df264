"""Which memory the CUDA driver has page-locked for us, so that a device copies from and to it by itself."""

from __future__ import annotations

import os
import resource
import weakref
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from mooncake_connector.log import get_logger, log_once
from mooncake_connector.sizes import human_nbytes
from transfer.transports.cuda.driver import CudaError, Driver

logger = get_logger(__name__)

MEND = "ulimit -l unlimited (LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)"
"""How a process may lock more memory."""


class _Pieces(NamedTuple):
    """What is locked, in order of the addresses."""

    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()


class PageLocks:
    """Page-locks memory of this process for all its devices: a `MemoryLocks` over the CUDA driver.

    After the first refusal nothing more is tried: what there is of locked memory is then best left to others. In a
    forked child nothing is locked, and nothing is undone: the child cannot use the device.

    Args:
        device: the driver's number of the one whose context is used.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver, self.device = driver, device
        self._pieces = _Pieces()
        self._refusals = 0
        self.refused: str | None = None
        """What the driver said when it refused."""
        _all.add(self)

    @property
    def nbytes(self) -> int:
        """So much is locked."""
        return sum(self._pieces.stops) - sum(self._pieces.starts)

    def covers(self, address: int, nbytes: int) -> bool:
        """Whether a device can copy these bytes: they lie in one piece. Takes no lock.

        The answer holds as long as a view of the store's memory there is valid.
        """
        starts, stops = self._pieces
        at = bisect_right(starts, address) - 1
        return at >= 0 and address + nbytes <= stops[at]

    def lock(self, address: int, nbytes: int) -> bool:
        """See `MemoryLocks`. Called by one thread at a time, as `unlock` is."""
        if self.refused is not None:
            return False
        try:
            self.driver.register(self.device, address, nbytes)
        except CudaError as error:
            self.refused = str(error)
            self._refusals += 1
            log_once(
                "vllm.page_lock", "%s of the pool are page-locked and no more, the driver refused (%s): pages beyond "
                "that are copied once more on their way to the device. If the limit of locked memory (%s "
                "here) is in the way, %s; `mooncake-connector doctor vllm` tries it",
                human_nbytes(self.nbytes), error, limit(), MEND, logger=logger,
            )  # fmt: skip
            return False
        starts, stops = self._pieces
        at = bisect_right(starts, address)
        self._pieces = _Pieces(
            (*starts[:at], address, *starts[at:]), (*stops[:at], address + nbytes, *stops[at:])
        )  # at once, for whoever reads it meanwhile
        return True

    def unlock(self, address: int) -> None:
        """See `MemoryLocks`."""
        starts, stops = self._pieces
        if address not in starts:  # the parent's
            return
        at = starts.index(address)
        self._pieces = _Pieces((*starts[:at], *starts[at + 1 :]), (*stops[:at], *stops[at + 1 :]))
        self.driver.unregister(self.device, address)

    def take_failures(self) -> Mapping[str, int]:
        """Refusals since this was asked last, by cause."""
        count, self._refusals = self._refusals, 0
        return {"page_lock": count} if count else {}

    def _abandon_in_child(self) -> None:
        self._pieces, self.refused = _Pieces(), "this process was forked"


def limit() -> str:
    """The limit of memory that this process may lock, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "none" if soft == resource.RLIM_INFINITY else human_nbytes(soft)


_all: weakref.WeakSet[PageLocks] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for locks in list(_all):
        locks._abandon_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
