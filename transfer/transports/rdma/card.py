"""An opened card: its protection domain, the memory that it knows, and what it can do."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_connector.sizes import human_nbytes
from transfer.transports.base import Region, TransferError, Unavailable
from transfer.transports.rdma.abi import Access
from transfer.transports.rdma.keys import Keys
from transfer.transports.rdma.queue_pair import QueuePair
from transfer.transports.rdma.rails import Rail, index_now, is_up
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.verbs import Channel, Queue, Registered, Window, open_device
from transfer.transports.vectors import Pieces, address_of

MAX_REQUESTS = 128
"""Under way on one queue pair."""
MAX_RANGES = 16
"""Of one request; cards that allow more are not faster with them."""
MAX_READS = 16
"""At the same time on the wire, of one queue pair; each takes room at the card that is read."""
CELL_NBYTES = 8
MAX_PROBES = 1023
"""At the same time; so many peers cannot be connecting."""
MAX_REQUEST_NBYTES = 1 << 20
"""A request that nobody wants any more ends soon."""
MAX_WINDOW_NBYTES = 1 << 31
"""NVIDIA's cards bind no larger ones."""

_MTU_NBYTES = (0, 256, 512, 1024, 2048, 4096)
"""By the verbs' code."""
LOCK_MORE = "; the limit of locked memory must be at least what is registered (ulimit -l unlimited)"


class Cells:
    """Memory for trying out a connection: a number that peers read, and places for those that are read here."""

    def __init__(self) -> None:
        self._numbers = np.zeros(1 + MAX_PROBES, dtype=np.uint64)
        self._places = itertools.cycle(range(1, 1 + MAX_PROBES))
        self.number = secrets.randbits(64)
        self._numbers[0] = self.number
        self.address = address_of(self._numbers)
        """Of the number."""
        self.region = Region(self.address, self._numbers.nbytes)

    def place(self) -> int:
        """Where a number may be read to; another one each time."""
        return next(self._places)

    def address_of(self, place: int) -> int:
        return self.address + CELL_NBYTES * place

    def holds(self, place: int, number: int) -> bool:
        return int(self._numbers[place]) == number


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that lie in one registered region."""

    address: int
    nbytes: int
    region: Region
    registered: Registered


@dataclass(frozen=True, slots=True)
class _AllKeys:
    """Args:
    filled: by which this process's memory is filled here.
    read: by which peers read the memory that has no windows.
    unreadable: of the memory that has, by which nobody reads anything; `windowed` are its regions, in this order.
    """

    filled: Keys
    read: Keys
    unreadable: Keys
    windowed: Sequence[tuple[Region, Registered]]


class Card:
    """A card by one of its ports. Safe to use from any thread."""

    def __init__(self, rail: Rail, settings: RdmaSettings) -> None:
        """Raises Unavailable with the reason."""
        self.rail, self.settings = rail, settings
        self._context = open_device(self.rail.device)
        try:
            self._domain = self._context.domain()
            limits, port = self._context.limits(), self._context.port(self.rail.port)
        except OSError as error:
            self._context.close()
            raise Unavailable(f"{self.rail} cannot be used: {error}") from error
        self.mtu, self.lid = port.active_mtu, port.lid
        self.max_requests = min(MAX_REQUESTS, limits.max_qp_wr, limits.max_cqe - 1)
        self.max_ranges = min(MAX_RANGES, limits.max_sge, limits.max_sge_rd or limits.max_sge)
        self.max_reads = min(MAX_READS, limits.max_qp_rd_atom, limits.max_qp_init_rd_atom or limits.max_qp_rd_atom)
        self.max_request_nbytes = max(1, min(2 * MAX_REQUEST_NBYTES, port.max_msg_sz) // 2)
        self.has_windows = limits.has_windows
        """Whether what is registered as `by_window` is read by memory windows; set it before anything is."""
        self._lock = threading.Lock()
        self._registered: dict[Region, Registered] = {}
        self._windowed: list[Region] = []
        self._keys: _AllKeys | None = None
        self.window_lock = threading.Lock()
        """Held while windows are bound and invalidated, so that no memory goes meanwhile."""
        self._windows: dict[Region, set[Window]] = {}
        self.cells = Cells()
        try:
            self.register(self.cells.region)
        except TransferError as error:
            self.close()
            raise Unavailable(str(error)) from error

    def register(self, region: Region, remedy: str = LOCK_MORE, *, by_window: bool = False) -> None:
        """Let the card fill it, and let peers that learn its key read it. Raises TransferError, which says `remedy`.

        Args:
            by_window: peers read it by the keys of windows alone, where the card has them.
        """
        is_windowed = by_window and self.has_windows
        try:
            made = self._domain.register(region.address, region.nbytes, self._access(is_windowed))
        except OSError as error:
            raise TransferError(f"{self.rail.device} cannot register it: {error}{remedy}") from error
        self._add(region, made, is_windowed)

    def register_dma_buf(self, region: Region, descriptor: int, offset: int, *, by_window: bool = False) -> None:
        """The same, of memory that a dma-buf has at `offset`; it is named by its addresses all the same, and nothing
        else of the dma-buf is. Raises TransferError."""
        is_windowed = by_window and self.has_windows
        access = self._access(is_windowed)
        try:
            made = self._domain.register_dma_buf(offset, region.nbytes, region.address, descriptor, access)
        except OSError as error:
            raise TransferError(f"{self.rail.device} takes no dma-buf: {error}") from error
        self._add(region, made, is_windowed)

    def unregister(self, region: Region) -> None:
        """Its keys are refused once this returned. Raises OSError."""
        with self._lock:
            registered = self._registered.pop(region)
            if region in self._windowed:
                self._windowed.remove(region)
            self._keys = None
        with self.window_lock, contextlib.ExitStack() as stack:
            stack.callback(registered.close)
            for window in self._windows.pop(region, ()):
                stack.callback(window.close)

    @staticmethod
    def _access(is_windowed: bool) -> Access:
        return Access.LOCAL_WRITE | (Access.MW_BIND if is_windowed else Access.REMOTE_READ)

    def _add(self, region: Region, made: Registered, is_windowed: bool) -> None:
        with self._lock:
            self._registered[region] = made
            if is_windowed:
                self._windowed.append(region)
            self._keys = None

    def keys(self) -> tuple[Keys, Keys]:
        """By which this process's memory is filled here, and by which peers read it without windows."""
        keys = self._all_keys()
        return keys.filled, keys.read

    def _all_keys(self) -> _AllKeys:
        with self._lock:
            if self._keys is None:
                known = sorted(self._registered.items(), key=lambda one: one[0].address)
                windowed = [(region, made) for region, made in known if region in self._windowed]
                self._keys = _AllKeys(
                    Keys.of((region, made.lkey) for region, made in known),
                    Keys.of((region, made.rkey) for region, made in known if region not in self._windowed),
                    Keys.of((region, made.rkey) for region, made in windowed),
                    windowed,
                )
            return self._keys

    def spans(self, pieces: Pieces) -> list[Span]:
        """What windows are needed for so that these can be read; none for what is read without windows.

        Call it with `window_lock` held.
        """
        keys = self._all_keys()
        spans = keys.unreadable.spans(pieces.local, pieces.nbytes, MAX_WINDOW_NBYTES)
        return [Span(address, nbytes, *keys.windowed[index]) for index, address, nbytes in spans]

    def unreadable(self, pieces: Pieces) -> bytes:
        """Keys of the regions that these pieces lie in, which let nobody read them."""
        return self._all_keys().unreadable.encode(pieces.local)

    def window(self) -> Window:
        """A new one. Raises OSError."""
        return self._domain.window()

    def bound(self, window: Window, span: Span) -> None:
        """It ends with this memory. Call it with `window_lock` held."""
        self._windows.setdefault(span.region, set()).add(window)

    def unbound(self, window: Window, span: Span) -> None:
        """Not any more. Call it with `window_lock` held."""
        self._windows.get(span.region, set()).discard(window)

    @property
    def described(self) -> str:
        """Its port and its limits, for people."""
        rail = self.rail
        speed = f"{rail.gbit_per_s:g} Gbit/s, " if rail.gbit_per_s else ""
        node = f"NUMA node {rail.node}, " if rail.node >= 0 else ""
        return (
            f"{rail}, entry {rail.gid_index} of its GID table, {speed}{node}MTU {_MTU_NBYTES[self.mtu]}, requests of "
            f"{human_nbytes(self.max_request_nbytes)} with {self.max_ranges} ranges, {self.max_requests} at a time, "
            f"{self.max_reads} of them on the wire, {'by memory windows' if self.has_windows else 'no memory windows'}"
        )

    @property
    def is_up(self) -> bool:
        """Whether the kernel says so of its port now."""
        return is_up(self.rail)

    @property
    def gid_index(self) -> int:
        """Of its address now. Raises OSError where the port has it no more."""
        return index_now(self.rail)

    def completion_channel(self) -> Channel:
        """Raises OSError."""
        return self._context.channel()

    def completion_queue(self, size: int, channel: Channel | None = None) -> Queue:
        """Raises OSError."""
        return self._context.queue(size, channel)

    def queue_pair(self, completions: Queue, max_requests: int) -> QueuePair:
        """Raises OSError."""
        return QueuePair(self._context, self._domain, completions, max_requests, self.max_ranges)

    def close(self) -> None:
        """Queues must be closed before. May be called twice."""
        with contextlib.ExitStack() as stack:
            for one in (self._context, self._domain):
                stack.callback(one.close)
            for region in list(self._registered):
                stack.callback(self.unregister, region)
