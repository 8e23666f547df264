"""What both halves of the PD protocol share: endings, times, and the orders that they give to whoever runs them.

The protocol is sans-I/O. `producer.Producer` and `consumer.Consumer` take calls of the engine,
messages, results and the time, and answer with orders; sockets, threads, memory and clocks are around them. A call
raises ValueError for a mistake of the caller, and then changes nothing; nothing that a peer sends raises. Neither half
is safe to use from two threads at once. docs/transfer.md has the rules.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from transfer.plan.granularity import Batch
from transfer.protocol.messages import AnyMessage, Granted, Landed, Reset


class Ending(enum.Enum):
    """What became of a transfer; each side comes to its own."""

    DONE = "done"
    """All bytes are at the consumer, and right."""
    FAILED = "failed"
    EXPIRED = "expired"
    """A lease or a deadline ran out."""
    CANCELLED = "cancelled"
    """One of the engines did not want it any more."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `heartbeat_s` must fit several times into `lease_s`, also into the peer's: heartbeats get lost."""

    lease_s: float = 30.0
    """A peer that says nothing for so long is given up; a finished prefill that nobody asks for, too."""
    heartbeat_s: float = 1.0
    retry_s: float = 1.0
    """What has not been answered is said again."""
    deadline_s: float = 120.0
    """For the consumer, from the announcement of a transfer to its ending."""
    hold_s: float = 300.0
    """For the producer, from the end of prefill to the release of its blocks, whatever heartbeats come."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message; it may get lost."""

    peer: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Write:
    """Producer: copy a batch into what was granted, take its checksums, and call `Producer.written` exactly once."""

    peer: str
    transfer: str
    granted: Granted
    number: int
    attempt: int
    batch: Batch


@dataclass(frozen=True, slots=True)
class Abandon:
    """Producer: writes of this transfer to this peer may be dropped or cancelled; each is still reported."""

    peer: str
    transfer: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Consumer: compare a batch with its checksums, and call `Consumer.verified` once."""

    peer: str
    transfer: str
    landed: Landed


@dataclass(frozen=True, slots=True)
class Revoke:
    """Consumer: end the grant of this transfer, and call `Consumer.revoked` when nothing can write to it any more."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Release:
    """The transfer is over; its blocks are the engine's alone. Given exactly once for each transfer of an engine."""

    transfer: str
    ending: Ending
    cause: str


Order: TypeAlias = Send | Write | Abandon | Verify | Revoke | Release


class Half(ABC):
    """One side of the protocol in one process: which lives of its peers it knows, and its orders.

    Args:
        generation: the life of this process: larger than its earlier ones, such as `time.time_ns()` at start.
    """

    _other: ClassVar[str]
    """What the peers are, for causes."""

    def __init__(self, generation: int, timing: Timing) -> None:
        self.generation = generation
        self._timing = timing
        self._lives: dict[str, int] = {}
        self._lost: set[str] = set()
        """Peers whose last known life is over."""
        self._orders: list[Order] = []

    def take(self) -> list[Order]:
        """The orders given since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders

    def met(self, peer: str, generation: int, now_s: float) -> None:
        """A handshake with this life of the peer; what was begun with another one fails."""
        before = self._lives.get(peer)
        self._lives[peer] = generation
        self._lost.discard(peer)
        if before not in (None, generation):
            self._fail_begun(peer, (0, generation), f"the {self._other} restarted", now_s)

    def lost(self, peer: str, now_s: float) -> None:
        """The peer's process is gone for certain; what was begun with it fails. A later life may come, and is `met`."""
        self._lost.add(peer)
        self._fail_begun(peer, (), f"the {self._other} is gone", now_s)

    def forget(self, peer: str) -> bool:
        """Remember nothing of a peer that has no connection any more. False while a transfer has to do with it."""
        if self._deals_with(peer):
            return False
        self._lives.pop(peer, None)
        self._lost.discard(peer)
        return True

    def receive(self, peer: str, message: AnyMessage, now_s: float) -> None:
        """A message came. One from an earlier life of the peer is dropped, one for an earlier life of ours refused."""
        known = self._lives.get(peer, 0)
        if message.generation < known or (message.generation == known and peer in self._lost):
            return
        if message.generation > known:
            self.met(peer, message.generation, now_s)
        if isinstance(message, Reset):
            return
        if message.to not in (0, self.generation):
            self._send(peer, Reset, message.transfer, to=message.generation)
            return
        self._handle(peer, message, now_s)

    @abstractmethod
    def tick(self, now_s: float) -> float | None:
        """Give the orders that are due. Call again after so many seconds, or, if None, after the next other call."""

    @abstractmethod
    def _handle(self, peer: str, message: AnyMessage, now_s: float) -> None:
        """A message of the peer's present life, meant for this one."""

    @abstractmethod
    def _deals_with(self, peer: str) -> bool:
        """Whether a transfer has a leg to or from the peer."""

    @abstractmethod
    def _fail_begun(self, peer: str, spared: Container[int], cause: str, now_s: float) -> None:
        """What was begun with the peer's lives fails, apart from those `spared`; 0 stands for whichever comes."""

    def _send(self, peer: str, kind: type[AnyMessage], transfer: str, *, to: int, **fields: Any) -> None:
        self._orders.append(Send(peer, kind(generation=self.generation, to=to, transfer=transfer, **fields)))
