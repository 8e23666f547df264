"""Device memory as the processor sees it: gathered into page-locked memory of the host, a part at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from transfer.transports.base import Int64
from transfer.transports.cuda.driver import Copier, Driver
from transfer.transports.cuda.plan import slots
from transfer.transports.vectors import Pieces

NBYTES = 8 << 20


class Staging:
    """See the module. For one thread.

    Args:
        nbytes: of page-locked memory.
    """

    def __init__(self, driver: Driver, device: int, nbytes: int = NBYTES) -> None:
        self._driver, self._device, self._nbytes = driver, device, nbytes
        self._copier = Copier(driver, device)
        self._address = driver.lock_pages(device, nbytes)

    def read(self, addresses: Int64, nbytes: Int64) -> Iterator[ctypes.Array[Any]]:
        """The bytes of these pieces of the device, one after the other; each part is valid until the next one.

        Raises CudaError.
        """
        for slot in slots(Pieces.of(addresses, addresses, nbytes), self._nbytes, 1):
            self._copier.run(self._copier.plan(*slot.gather(self._address)))
            yield (ctypes.c_char * slot.pieces.total).from_address(self._address)

    def close(self) -> None:
        """Give the memory back; nothing may be read any more."""
        self._copier.close()
        self._driver.unlock_pages(self._device, self._address)
