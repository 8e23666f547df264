"""What every transport offers, and the values that cross it.

A transport moves bytes from registered memory of this process into memory that a peer granted, many pieces at a time.
It knows nothing of KV. The receiving side looks at every piece before it touches its memory, and after `Memory.revoke`
returned no byte of the granted memory changes any more, whatever the sender still does.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from mooncake_connector.errors import MooncakeConnectorError
from transfer.transports.rdma.settings import RdmaSettings

if TYPE_CHECKING:
    from transfer.control.handshake import Identity
    from transfer.transports.cuda.stage import OnDevice
    from transfer.transports.memory import Memory
    from transfer.transports.tls import Tls

Int64: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = "Int64 | list[int]"
"""A column of numbers: a list where there are few, for which numpy's calls cost more than the work, else an array."""
FEW = 8
"""So many pieces are few; their order is read in one step."""

GRANT_KEY_NBYTES = 16
INSTANCE_NBYTES = 16
MAX_PIECE_NBYTES = 1 << 47
"""Beyond any address space of user memory; keeps sums of an address and a size inside int64."""


class TransferError(MooncakeConnectorError):
    """A peer, an address or a grant that cannot be used."""


class Unavailable(TransferError):
    """This transport does not reach that peer; another one may. `str(error)` is the reason to log."""


class Cause(enum.Enum):
    """Why a write failed."""

    REFUSED = "refused"
    """The peer does not know the grant, or revoked it, or a piece lies outside of it."""
    SOURCE = "source"
    """The memory to send was unregistered meanwhile, or cannot be read."""
    PEER_LOST = "peer_lost"
    """The peer died, closed, or did not take any byte for too long."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a write. Only `ok` says that all bytes are in the peer's memory; otherwise any part may be."""

    cause: Cause | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.cause is None

    def __str__(self) -> str:
        return "ok" if self.cause is None else f"{self.cause.value}: {self.detail}"


OK = Outcome()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, by which it is found (see `transfer.transports.registry`)."""

    host_memory: bool = True
    """It moves memory of the host."""
    device_memory: bool = False
    """It moves memory of a device, by itself or through stages."""
    other_host: bool = False
    """It reaches peers of other hosts, at the addresses that are configured; without any it is left out."""
    needs_registration: bool = False
    """It touches only memory that it was told of by `Transport.register`."""
    needs_library: bool = False
    """It is offered only where a library that is not ours is installed and works; it says so by Unavailable."""


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What transports are made from; each takes what concerns it.

    Args:
        hosts: literal addresses to listen on, and certificates, of those that reach other hosts.
        place: the device that has the memory; None for memory of the host.
        rdma: how cards are used.
    """

    identity: Identity
    hosts: Sequence[str] = ("127.0.0.1",)
    tls: Tls | None = None
    place: OnDevice | None = None
    rdma: RdmaSettings = field(default_factory=RdmaSettings)


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory of this process; a stage is of the host where what it holds comes from or goes to a device."""

    address: int
    nbytes: int
    is_stage: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Memory of the granting process that whoever knows `key` may write to.

    The ranges are ascending and neither overlap nor touch. Addresses are those of the granting process.
    """

    key: bytes
    addresses: Int64
    nbytes: Int64

    def covers(self, addresses: Numbers, nbytes: Numbers) -> bool:
        """Whether each piece lies inside one range."""
        return first_outside(addresses, nbytes, self.addresses, self.nbytes) is None


class Completion:
    """The outcome of one write, which comes by itself: at the latest at its deadline."""

    def __init__(self, deadline_at: float) -> None:
        self.deadline_at = deadline_at
        """In `time.monotonic()` seconds."""
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._callbacks: list[Callable[[Outcome], None]] = []
        self._stop: Callable[[], None] | None = None

    @property
    def outcome(self) -> Outcome | None:
        """None while the write is under way."""
        return self._outcome

    def settle(self, outcome: Outcome) -> bool:
        """Set the outcome unless there is one; return whether it was set. Callbacks run in this thread."""
        with self._lock:
            if self._outcome is not None:
                return False
            if self._stop is not None and not outcome.ok:
                self._stop()
            self._outcome = outcome
            self._stop = None  # else a cycle: it knows the write, and that us
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(outcome)
        return True

    def cancel(self) -> None:
        """Stop sending. What is on its way may still arrive, until the peer revokes its grant."""
        self.settle(Outcome(Cause.CANCELLED, "the sender cancelled the write"))

    def stop_with(self, stop: Callable[[], None]) -> None:
        """Have `stop` called before any outcome but ok is known: it makes sure that the source is not read any more."""
        self._stop = stop

    def add_done_callback(self, callback: Callable[[Outcome], None]) -> None:
        """Call `callback` once with the outcome: in the transport's thread, or at once. It must not raise or block."""
        with self._lock:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback(self._outcome)


class Peer(ABC):
    """A connection to one process that grants memory. Safe to use from any thread."""

    transport: str
    """Name of the transport that reaches it."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once no write can succeed any more: connect again."""

    @abstractmethod
    def write(self, grant: Grant, local: Int64, remote: Int64, nbytes: Int64, *, deadline_s: float) -> Completion:
        """Copy `nbytes[i]` bytes from `local[i]`, here, to `remote[i]` in the peer's granted memory, for every i.

        Returns at once; the source must keep its bytes until the outcome is there, and is not read by this process
        afterwards. Pieces of 0 bytes and beyond 4 GiB
        are fine, the order in which pieces arrive is open, and pieces must not overlap in the destination. Raises
        ValueError, before anything is sent, for arrays that do not fit together, a source outside of registered memory
        or a destination outside of the grant; everything later is an outcome. Until the grant is revoked, anything may
        still arrive where a failed one was to write: try again under a new grant.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way and let go of the peer. May be called twice."""


class Transport(ABC):
    """One way to reach peers; also accepts their connections. Safe to use from any thread."""

    name: ClassVar[str]
    """In the configuration, and towards peers."""
    capabilities: ClassVar[Capabilities]
    place: OnDevice | None = None
    """The device that has the memory, where that travels through stages of the host: only these are registered then,
    unless `takes_device`."""
    takes_device: bool = False
    """It uses what it can of that device's memory by itself, and stages for the rest."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    @classmethod
    @abstractmethod
    def make(cls, memory: Memory, options: TransportOptions) -> Transport:
        """Raises Unavailable where this machine lacks something for it, TransferError or ValueError for the options."""

    @abstractmethod
    def listen(self) -> bytes:
        """Accept peers from now on; return the endpoint that they pass to `connect`. Further calls return the same.

        Raises OSError, TransferError.
        """

    @abstractmethod
    def connect(self, endpoint: bytes, *, deadline_s: float) -> Peer:
        """A connection to the process that listens at `endpoint`, within `deadline_s`.

        Raises Unavailable with the reason where this transport cannot serve that peer: another host, no permission,
        nobody there, another secret or version.
        """

    def register(self, region: Region) -> None:  # noqa: B027
        """Called before anything may touch this memory, where `needs_registration`.

        Raises TransferError or OSError where it cannot be used; the transport is not offered then.
        """

    def unregister(self, region: Region) -> None:  # noqa: B027
        """Called when nothing touches this memory any more and before it goes away, once for each registered region."""

    def take_counts(self) -> Mapping[str, Mapping[str, int]]:
        """What it counts besides: figures of the metrics, each by its label, since the last call."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the listener and every connection, either way. May be called twice."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def first_outside(addresses: Numbers, nbytes: Numbers, starts: Int64, sizes: Int64) -> int | None:
    """Number of the first piece that does not lie inside one of the ranges, which ascend and do not overlap.

    Nothing may be negative or beyond `MAX_PIECE_NBYTES`; a piece that is counts as outside.
    """
    if isinstance(addresses, list):
        for number, address in enumerate(addresses):
            index = bisect_right(starts, address) - 1
            if index < 0 or not 0 <= nbytes[number] <= starts.item(index) + sizes.item(index) - address:
                return number
        return None
    if len(addresses) == 0 or len(starts) == 0:
        return 0 if len(addresses) else None
    many = np.asarray(nbytes)
    if many.min() >= 0 and max(many.max(), addresses.max()) <= MAX_PIECE_NBYTES:  # most often all lie in one range
        index = bisect_right(starts, int(addresses.min())) - 1
        if index >= 0 and (addresses + many).max() <= starts.item(index) + sizes.item(index):
            return None
    sane = (addresses >= 0) & (many >= 0) & (many <= MAX_PIECE_NBYTES) & (addresses <= MAX_PIECE_NBYTES)
    at = starts.searchsorted(addresses, side="right") - 1
    safe = np.maximum(at, 0)
    fits = sane & (at >= 0) & (addresses + np.where(sane, many, 0) <= starts[safe] + sizes[safe])
    worst = int(fits.argmin())
    return None if fits[worst] else worst
