"""Which memory of a device the cards of this process touch by themselves, and which goes through page-locked stages."""

from __future__ import annotations

import logging

import numpy as np

from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.transports.base import Numbers, Region, TransferError, Unavailable, first_outside
from transfer.transports.cuda.direct import DMA_BUF, DirectMemory
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.rdma.opened import OpenRails
from transfer.transports.rdma.trial import TRIED_NBYTES, try_out

logger = get_logger(__name__)


class DeviceRegions:
    """Of one device and all cards in use. Safe to use from any thread; one at a time registers."""

    def __init__(self, rails: OpenRails, place: OnDevice) -> None:
        """Tries it out with a little memory of the device's. Raises Unavailable where one of the cards has none of it.

        Each can be registered by itself; whether what lies between card and device lets bytes pass shows only then. So
        `way`, the first by which it does, is how all regions are registered.
        """
        self._rails, self._memory = rails, DirectMemory(place)
        self.by_window = False
        """Whether peers read it by memory windows."""
        self._direct: list[Region] = []
        self._ranges = np.zeros((2, 0), dtype=np.int64)
        address = place.driver.allocate(place.device, TRIED_NBYTES)
        try:
            self.way = self._try_out(Region(address, TRIED_NBYTES))
        finally:
            place.driver.free(place.device, address)

    def register(self, region: Region) -> None:
        """With every card; what one of them does not take goes through stages, and a line in the log says why."""
        try:
            self._register(region, self.way)
        except TransferError as error:
            reason, size = f"{self.way}: {error}", f"{region.nbytes} bytes at {region.address:#x}"
            cause = f"transfer.rdma.staged:{kind_of(reason)}"
            log_once(cause, "rdma: %s of GPU memory go through page-locked stages: %s", size, reason, logger=logger)
            return
        self._set([*self._direct, region])
        device = self._memory.place.device
        said = "rdma: cards read and fill memory of GPU %d by themselves (%s)"
        cause = f"transfer.rdma.direct:{device}:{self.described}"
        log_once(cause, said, device, self.described, level=logging.INFO, logger=logger)

    @property
    def described(self) -> str:
        """How, for people."""
        return f"{self.way}, {'by memory windows' if self.by_window else 'no memory windows'}"

    def unregister(self, region: Region) -> None:
        """Raises OSError where a card does not let go of it."""
        if region in self._direct:
            self._set([other for other in self._direct if other != region])
            self._rails.unregister(region)

    def cover(self, addresses: Numbers, nbytes: Numbers) -> bool:
        """Whether the cards touch all these pieces by themselves."""
        starts, sizes = self._ranges
        return first_outside(addresses, nbytes, starts, sizes) is None

    def cover_first(self, pieces: Numbers, nbytes: Numbers) -> bool:
        """The same of pieces of which either all or none are such."""
        return self.cover(pieces[:1], nbytes[:1])

    def settle(self) -> None:
        """See `DirectMemory.settle`."""
        self._memory.settle()

    def _try_out(self, region: Region) -> str:
        """The first way by which every card has it, and sets `by_window`. Raises Unavailable with what stood in the way
        of each."""
        failures: list[str] = []
        have_windows = any(rail.card.has_windows for rail in self._rails.all)
        for way in self._memory.ways:
            for self.by_window in [True, False] if have_windows else [False]:
                try:
                    self._try_out_by(way, region)
                except (TransferError, OSError) as error:
                    if not self.by_window:
                        failures.append(f"{way}: {error}")
                else:
                    return way
        raise Unavailable("; ".join(failures))

    def _try_out_by(self, way: str, region: Region) -> None:
        """Raises TransferError, OSError."""
        self._register(region, way)
        try:
            for rail in self._rails.all:
                try_out(rail.card, self._memory, region.address)
        finally:
            self._rails.unregister(region)

    def _register(self, region: Region, way: str) -> None:
        """Raises TransferError."""
        self._memory.check(region)
        if way == DMA_BUF:
            with self._memory.exported(region) as (descriptor, offset):
                self._rails.register_dma_buf(region, descriptor, offset, by_window=self.by_window)
        else:
            self._rails.register_device(region, by_window=self.by_window)

    def _set(self, regions: list[Region]) -> None:
        self._direct = sorted(regions, key=lambda region: region.address)
        rows = [(region.address, region.nbytes) for region in self._direct]
        self._ranges = np.array(rows, dtype=np.int64).reshape(-1, 2).T.copy()
