"""Same host, device memory to device memory: the receiver opens the sender's allocations and fetches on its device.

As with `cma` the receiver copies, under the lock of the grant, and waits for its device before it lets go of that: so a
revoked grant ends for good. Before each order the sender says in which allocations the pieces lie (`Window`); the
receiver opens each once, keeps it as long as the connection lives, and holds every piece against what it really
opened, since a device that reads a wrong address ends the work of the whole process.

The caller has waited for the kernels that wrote the source before it calls `write`. While a peer is connected, memory
that was sent from must not be given back to the driver (engines keep their KV cache until they end).
"""

from __future__ import annotations

import contextlib
import os
from array import array
from typing import TypeAlias

import numpy as np

from mooncake_connector.log import get_logger, log_once
from transfer.control.handshake import Identity
from transfer.transports.base import (
    MAX_PIECE_NBYTES,
    Capabilities,
    Int64,
    Numbers,
    Region,
    TransportOptions,
    Unavailable,
    first_outside,
)
from transfer.transports.channel import Channel
from transfer.transports.cuda.copier import LONG_IN_DEVICE_NBYTES, Copier
from transfer.transports.cuda.driver import HANDLE_NBYTES, Allocation, CudaError, Driver, system_driver
from transfer.transports.local import LocalTransport, probe
from transfer.transports.memory import Memory
from transfer.transports.pull import Fetch, Fetcher, PullEncoder, PullTransport
from transfer.transports.stream import PayloadEncoder
from transfer.transports.unix import credentials
from transfer.transports.vectors import Pieces
from transfer.transports.wire import PROBE_KEY, CopyOrder, CopyStatus, WireError

logger = get_logger(__name__)

MAX_ORDER_NBYTES = 256 << 20
"""Copied in one go: what `revoke` may have to wait for, some 20 ms over PCIe."""
MAX_WINDOWS = 1024
"""Of one order."""
MAX_OPEN = 4096
"""Of one connection."""
Windows: TypeAlias = tuple[list[bytes], Int64, Int64]
"""Handles, addresses and sizes of allocations."""
_WINDOW = np.dtype([("handle", f"V{HANDLE_NBYTES}"), ("address", "<u8"), ("nbytes", "<u8")])


class CudaIpcTransport(PullTransport, LocalTransport):
    """See the module. Raises Unavailable where there is no CUDA driver or device."""

    name = "cuda_ipc"
    capabilities = Capabilities(host_memory=False, device_memory=True)
    max_nbytes = MAX_ORDER_NBYTES
    max_attached = MAX_WINDOWS * _WINDOW.itemsize

    def __init__(self, memory: Memory, identity: Identity | None = None, driver: Driver | None = None) -> None:
        super().__init__(memory, identity)
        self.driver = driver or system_driver()
        self._copiers: dict[int, Copier] = {}

    @classmethod
    def make(cls, memory: Memory, options: TransportOptions) -> CudaIpcTransport:
        return cls(memory, options.identity, None if options.place is None else options.place.driver)

    def close(self) -> None:
        super().close()
        while self._copiers:
            self._copiers.popitem()[1].close()

    def copier(self, device: int) -> Copier:
        """For the receiving thread."""
        if device not in self._copiers:
            self._copiers[device] = Copier(self.driver, device, LONG_IN_DEVICE_NBYTES)
        return self._copiers[device]

    def _fetcher(self, channel: Channel) -> Fetcher:
        return _DeviceFetcher(self, is_own_process=credentials(channel.socket)[0] == os.getpid())

    def _prepare(self, channel: Channel, deadline_at: float) -> PayloadEncoder:
        regions = DeviceRegions(self.memory, self.driver)
        windows = regions.windows()
        if len(windows) < len(regions.of()) or len(windows) > MAX_WINDOWS:
            raise Unavailable(f"what is registered here is not device memory that can be shared, {MAX_WINDOWS} pieces")
        if windows:
            _try_out(channel, windows, deadline_at)
        return _WindowEncoder(regions)


class DeviceRegions:
    """In which allocations the registered memory of this process lies. For one thread at a time."""

    def __init__(self, memory: Memory, driver: Driver) -> None:
        self._memory, self._driver = memory, driver
        self._known: list[Region] = []
        self._starts = np.zeros(0, dtype=np.int64)
        self._allocations: list[Allocation | None] = []
        self._handles: dict[Allocation, bytes] = {}

    def of(self, addresses: Numbers | None = None) -> set[Allocation | None]:
        """Those of registered addresses, or all; None is among them for what is not within one allocation."""
        known = self._memory.regions
        if self._known is not known:
            self._known = known
            regions = [region for region in known if not region.is_stage]
            self._starts = np.array([region.address for region in regions], dtype=np.int64)
            self._allocations = [self._of(region) for region in regions]
            self._handles = {}
        index = np.unique(self._starts.searchsorted(self._starts if addresses is None else addresses, side="right") - 1)
        return {self._allocations[i] if i >= 0 else None for i in index.tolist()}

    def windows(self, addresses: Numbers | None = None) -> dict[Allocation, bytes]:
        """Those that can be shared, with what another process opens each with."""
        for allocation in (found := self.of(addresses)):
            if allocation is not None and allocation not in self._handles:
                with contextlib.suppress(CudaError):
                    self._handles[allocation] = self._driver.export(allocation)
        return {one: self._handles[one] for one in found if one in self._handles}

    def _of(self, region: Region) -> Allocation | None:
        found = self._driver.allocation(region.address)
        return found if found and region.address + region.nbytes <= found.address + found.nbytes else None


class _WindowEncoder(PullEncoder):
    """Says in which allocations the pieces are as well."""

    def __init__(self, regions: DeviceRegions) -> None:
        super().__init__(MAX_ORDER_NBYTES)
        self._regions = regions

    def attachment(self, pieces: Pieces) -> bytes:
        """Where something cannot be shared, its window is missing, and the receiver answers that it cannot read it."""
        return encode_windows(self._regions.windows(pieces.local))


class _DeviceFetcher(Fetcher):
    """Reads the sender's allocations."""

    is_stepwise = True
    max_under_way = 1

    def __init__(self, transport: CudaIpcTransport, is_own_process: bool) -> None:
        self._transport, self._driver = transport, transport.driver
        self._regions = DeviceRegions(transport.memory, transport.driver)
        self._is_own_process = is_own_process  # which may not open what it shares
        self._opened: dict[tuple[int, bytes], int] = {}

    def start(self, fetch: Fetch) -> CopyStatus | None:
        return self._attempt(fetch, fetch.pieces.remote, self._regions.of(fetch.pieces.remote))

    def probe(self, fetch: Fetch, number: int) -> CopyStatus | None:
        """Whether this process's device reads the sender's: copies a byte to nowhere."""
        if fetch.pieces.total != 1:
            raise WireError("a probe of something else than a byte")
        seen = array("B", [0])
        return self._attempt(fetch, [seen.buffer_info()[0]], self._regions.of())

    def close(self) -> None:
        for (device, _), address in self._opened.items():
            with contextlib.suppress(CudaError):
                self._driver.close(device, address)
        self._opened.clear()

    def _attempt(self, fetch: Fetch, destination: Numbers, target: set[Allocation | None]) -> CopyStatus:
        """Copy, to memory that is in the `target` allocations (a probe: that the sender would write to)."""
        devices = {None if one is None else one.device for one in target}
        device = devices.pop() if len(devices) == 1 else None
        if device is None:
            return CopyStatus.FORBIDDEN
        columns = destination, fetch.pieces.nbytes, fetch.pieces.local
        remote, nbytes, local = (np.asarray(column, dtype=np.int64) for column in columns)
        held = fetch.held
        windows = decode_windows(fetch.attachment)
        try:
            source = self._locate(windows, device, local, nbytes)
            if source is None:
                return CopyStatus.UNREADABLE
            copier = self._transport.copier(device)
            if held is None:
                copier.run(copier.plan_each(source, remote, nbytes))
                return CopyStatus.OK
            plan = copier.plan(source, remote, nbytes)
            with held.lock:
                if held.revoked:
                    return CopyStatus.NO_GRANT
                copier.run(plan)
        except CudaError as error:
            log_once("transfer.cuda_ipc", "cuda_ipc: a peer's memory cannot be read: %s", error, logger=logger)
            return CopyStatus.UNREADABLE
        return CopyStatus.OK

    def _locate(self, windows: Windows, device: int, addresses: Int64, nbytes: Int64) -> Int64 | None:
        """Where the sender's pieces lie here; None where one is in no window, or a window is not what it said."""
        handles, starts, sizes = windows
        if first_outside(addresses, nbytes, starts, sizes) is not None:
            return None
        index = starts.searchsorted(addresses, side="right") - 1
        here = np.zeros_like(starts)
        for i in np.unique(index).tolist():
            here[i] = starts[i] if self._is_own_process else self._open(device, handles[i])
            if here[i] + sizes[i] > self._end(device, int(here[i])):
                return None
        return addresses - starts[index] + here[index]

    def _end(self, device: int, address: int) -> int:
        """Where the allocation of a window ends: the context that opened it is asked. Raises CudaError."""
        if self._is_own_process:
            own = self._driver.allocation(address)
            return 0 if own is None else own.address + own.nbytes
        return sum(self._driver.bounds(device, address))

    def _open(self, device: int, handle: bytes) -> int:
        if (device, handle) not in self._opened:
            if len(self._opened) >= MAX_OPEN:
                raise WireError(f"a peer that sends from more than {MAX_OPEN} allocations")
            self._opened[device, handle] = self._driver.open(device, handle)
        return self._opened[device, handle]


def encode_windows(handles: dict[Allocation, bytes]) -> bytes:
    """What goes before an order: the allocations that its pieces are in, by address."""
    rows = [(handles[one], one.address, one.nbytes) for one in sorted(handles, key=lambda one: one.address)]
    return np.array(rows, dtype=_WINDOW).tobytes()


def decode_windows(data: bytes) -> Windows:
    """Handles, addresses and sizes. Raises WireError for what no sender sends."""
    if len(data) % _WINDOW.itemsize:
        raise WireError(f"windows of {len(data)} bytes")
    rows = np.frombuffer(data, _WINDOW)
    numbers = np.stack((rows["address"], rows["nbytes"]))
    if numbers.size and not (numbers.min() > 0 and numbers.max() <= MAX_PIECE_NBYTES):
        raise WireError(f"a window with {int(numbers.min())} or {int(numbers.max())} as its address or size")
    starts, sizes = numbers.astype(np.int64)
    if (starts[1:] < starts[:-1] + sizes[:-1]).any():
        raise WireError("windows that overlap or do not ascend")
    return [row.tobytes() for row in rows["handle"]], starts, sizes


def _try_out(channel: Channel, windows: dict[Allocation, bytes], deadline_at: float) -> None:
    """Have the receiver read a byte of the first window. Raises Unavailable where it cannot."""
    here = [min(window.address for window in windows)]
    order = CopyOrder(0, PROBE_KEY, 1, 1).encode(here, [1], here, attachment=encode_windows(windows))
    status = probe(channel, order, deadline_at, "our device memory")
    if status is CopyStatus.FORBIDDEN:
        raise Unavailable("the peer's memory is not that of one device")
    if status is not CopyStatus.OK:
        raise Unavailable(
            "the peer's device cannot read ours; the peer logged what its driver says (are they in one host, and each "
            "visible to the driver of both containers?)"
        )
