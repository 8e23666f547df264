"""Memory of a device that cards read and fill by themselves (GPUDirect RDMA): how they get hold of it, and when what
they wrote is there. What a card does with it is `transfer.transports.rdma`'s.

Two ways: the driver exports pages as a dma-buf, which the card's driver maps; or NVIDIA's module nvidia_peermem has
cards take device addresses as those of the host.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from transfer.transports.base import Region, Unavailable
from transfer.transports.cuda.driver import DMA_BUF_SUPPORTED, FLUSH_BY_HOST, FLUSH_OPTIONS, ORDERED_FOR_OWNER
from transfer.transports.cuda.driver import WRITES_ORDERING as ORDERING
from transfer.transports.cuda.stage import OnDevice

PEER_MEMORY = Path("/sys/module/nvidia_peermem")
DMA_BUF, BY_MODULE = "dma-buf", "nvidia_peermem"
"""The ways; the first is preferred."""
_GET_IT = (
    "the driver exports no dma-buf (NVIDIA's open kernel modules do, on Linux 5.12 and newer), and nvidia_peermem is "
    "not loaded (modprobe nvidia_peermem)"
)


class DirectMemory:
    """Of one device. Safe to use from any thread."""

    def __init__(self, place: OnDevice) -> None:
        """Raises Unavailable with what is missing."""
        self.place, driver, device = place, place.driver, place.device
        self._must_flush = driver.attribute(device, ORDERING) < ORDERED_FOR_OWNER
        if self._must_flush and not driver.attribute(device, FLUSH_OPTIONS) & FLUSH_BY_HOST:
            raise Unavailable(f"nobody can say when GPU {device} sees what a card wrote: its driver offers no flush")
        self.ways = [DMA_BUF] if driver.attribute(device, DMA_BUF_SUPPORTED) else []
        """Those that this machine offers, the preferred one first."""
        if PEER_MEMORY.exists():
            self.ways.append(BY_MODULE)
        if not self.ways:
            raise Unavailable(_GET_IT)

    def check(self, region: Region) -> None:
        """Raises Unavailable for what is not memory of this device."""
        for address in (region.address, region.address + region.nbytes - 1):
            found = self.place.driver.allocation(address)
            if found is None or found.device != self.place.device:
                raise Unavailable(f"it is not memory of GPU {self.place.device}")

    @contextlib.contextmanager
    def exported(self, region: Region) -> Iterator[tuple[int, int]]:
        """As a dma-buf: a descriptor, closed afterwards, and where in it the region begins. Raises CudaError.

        Whoever maps it meanwhile keeps the memory, also where the addresses get other memory later.
        """
        start, nbytes = whole_pages(region)
        descriptor = self.place.driver.export_dma_buf(self.place.device, start, nbytes)
        try:
            yield descriptor, region.address - start
        finally:
            os.close(descriptor)

    def settle(self) -> None:
        """Once a card has said that it wrote, or that it never will: wait until the device sees all that was written.

        A card's word reaches the host's memory by another way than its bytes the device's, and may overtake them.
        Raises CudaError.
        """
        if self._must_flush:
            self.place.driver.flush_writes(self.place.device)


def whole_pages(region: Region, page_nbytes: int = mmap.PAGESIZE) -> tuple[int, int]:
    """Address and size of the fewest pages of the host that hold it."""
    start = region.address - region.address % page_nbytes
    stop = region.address + region.nbytes
    return start, -(-(stop - start) // page_nbytes) * page_nbytes
