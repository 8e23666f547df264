"""An opened card: its protection domain, the memory that it knows, and what it can do."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mooncake_connector.log import get_logger, kind_of, log_once
from mooncake_connector.sizes import human_nbytes
from transfer.transports.base import Region, TransferError, Unavailable
from transfer.transports.rdma.keys import Keys
from transfer.transports.rdma.rails import SYSFS, Rail, chosen, distances, index_now, is_up, links_to, rails, unused
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.verbs import binding, open_device
from transfer.transports.vectors import address_of

logger = get_logger(__name__)

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


class Card:
    """A card by one of its ports. Safe to use from any thread."""

    def __init__(self, rail: Rail, settings: RdmaSettings) -> None:
        """Raises Unavailable with the reason."""
        self._verbs = binding()
        self.rail, self.settings = rail, settings
        self._context = open_device(self.rail.device)
        try:
            self._domain = self._context.alloc_pd()
            limits, port = self._context.query_device(), self._context.query_port(self.rail.port)
            self.mtu, self.lid = int(port.active_mtu), int(port.lid)
            self.max_requests = min(MAX_REQUESTS, limits.max_qp_wr, limits.max_cqe - 1)
            self.max_ranges = min(MAX_RANGES, limits.max_sge)
            self.max_reads = min(MAX_READS, limits.max_qp_rd_atom)
            self.max_request_nbytes = max(1, min(2 * MAX_REQUEST_NBYTES, port.max_msg_sz) // 2)
        except OSError as error:
            self._context.close()
            raise Unavailable(f"{self.rail} cannot be used: {error}") from error
        self._lock = threading.Lock()
        self._registered: dict[Region, Any] = {}
        self._keys: tuple[Keys, Keys] | None = None
        self.cells = Cells()
        try:
            self.register(self.cells.region)
        except TransferError as error:
            self.close()
            raise Unavailable(str(error)) from error

    def register(self, region: Region, remedy: str = LOCK_MORE) -> None:
        """Let the card fill it, and let peers that learn its key read it. Raises TransferError, which says `remedy`."""
        try:
            made = self._domain.reg_mr(region.address, region.nbytes, self._access)
        except OSError as error:
            raise TransferError(f"{self.rail.device} cannot register it: {error}{remedy}") from error
        self._add(region, made)

    def register_dma_buf(self, region: Region, descriptor: int, offset: int) -> None:
        """The same, of memory that a dma-buf has at `offset`; it is named by its addresses all the same, and nothing
        else of the dma-buf is. Raises TransferError."""
        try:
            made = self._domain.reg_dmabuf_mr(offset, region.nbytes, region.address, descriptor, self._access)
        except (OSError, RuntimeError) as error:  # RuntimeError: a libibverbs that does not know the call
            raise TransferError(f"{self.rail.device} takes no dma-buf: {error}") from error
        self._add(region, made)

    def unregister(self, region: Region) -> None:
        """Its keys are refused once this returned. Raises OSError."""
        with self._lock:
            registered = self._registered.pop(region)
            self._keys = None
        registered.close()

    @property
    def _access(self) -> int:
        return int(self._verbs.AccessFlags.LOCAL_WRITE | self._verbs.AccessFlags.REMOTE_READ)

    def _add(self, region: Region, made: Any) -> None:
        with self._lock:
            self._registered[region] = made
            self._keys = None

    def keys(self) -> tuple[Keys, Keys]:
        """By which this process's memory is filled here, and by which peers read it."""
        with self._lock:
            if self._keys is None:
                filled = Keys.of((region, made.lkey) for region, made in self._registered.items())
                read = Keys.of((region, made.rkey) for region, made in self._registered.items())
                self._keys = filled, read
            return self._keys

    @property
    def described(self) -> str:
        """Its port and its limits, for people."""
        rail = self.rail
        speed = f"{rail.gbit_per_s:g} Gbit/s, " if rail.gbit_per_s else ""
        node = f"NUMA node {rail.node}, " if rail.node >= 0 else ""
        return (
            f"{rail}, entry {rail.gid_index} of its GID table, {speed}{node}MTU {_MTU_NBYTES[self.mtu]}, requests of "
            f"{human_nbytes(self.max_request_nbytes)} with {self.max_ranges} ranges, {self.max_requests} at a time, "
            f"{self.max_reads} of them on the wire"
        )

    @property
    def is_up(self) -> bool:
        """Whether the kernel says so of its port now."""
        return is_up(self.rail)

    @property
    def gid_index(self) -> int:
        """Of its address now. Raises OSError where the port has it no more."""
        return index_now(self.rail)

    def completion_channel(self) -> Any:
        """An `ibverbs.CompChannel`. Raises OSError."""
        return self._context.create_comp_channel()

    def completion_queue(self, size: int, channel: Any = None) -> Any:
        """An `ibverbs.CQ`. Raises OSError."""
        return self._context.create_cq(size, channel)

    def queue_pair(self, completions: Any, max_requests: int) -> Any:
        """A reliable connected `ibverbs.QP`. Raises OSError."""
        return self._domain.create_qp(
            self._verbs.QPInitAttr(
                send_cq=completions, recv_cq=completions, qp_type=self._verbs.QPType.RC, max_send_wr=max_requests,
                max_recv_wr=1, max_send_sge=self.max_ranges, max_recv_sge=1,
            )
        )  # fmt: skip

    def close(self) -> None:
        """Queues must be closed before. May be called twice."""
        for region in list(self._registered):
            self.unregister(region)
        self._domain.close()
        self._context.close()


def open_cards(hosts: Sequence[str], settings: RdmaSettings, near: str = "") -> list[Card]:
    """One for each port to use, the best first; one that cannot be used is left out. Raises Unavailable for none.

    Args:
        hosts: the addresses by which peers know this process: ports that have them are preferred.
        near: the PCI address of the device whose memory cards are to reach by themselves.
    """
    cards: list[Card] = []
    reasons: list[str] = []
    for rail in _rails(hosts, settings, links_to(near) if near else {}):
        try:
            cards.append(Card(rail, settings))
        except Unavailable as error:
            reasons.append(str(error))
    if not cards:
        raise Unavailable("; ".join(reasons))
    if missing := unused(settings.ports, [card.rail for card in cards]):
        reasons.append(f"rdma_ports names {', '.join(missing)}: no such port is up with an address for RDMA")
    for reason in reasons:
        log_once(f"transfer.rdma.rail:{kind_of(reason)}", "rdma: a rail is left out: %s", reason, logger=logger)
    return cards


def _rails(hosts: Sequence[str], settings: RdmaSettings, links: Mapping[str, int]) -> list[Rail]:
    """Raises Unavailable."""
    found = rails()
    if not found:  # asked first: a process without a card never has the library
        raise Unavailable(f"there is no RDMA card: {SYSFS} is empty")
    binding()
    if several := chosen(found, hosts, settings.ports, settings.gid_index, distances(), links):
        return several
    seen = ", ".join(sorted({f"{rail.device} port {rail.port} {'up' if rail.is_up else 'down'}" for rail in found}))
    of = f" of {', '.join(settings.ports)}" if settings.ports else ""
    at = "" if settings.gid_index is None else f" at entry {settings.gid_index} of its table"
    raise Unavailable(f"no port{of} is up with a RoCE v2 or InfiniBand address{at}: {seen}")
