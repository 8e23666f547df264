"""What both sides of the protocol share: a transfer's record, endings, times, and the orders that they give.

The protocol is sans-I/O. `producer.Producer` and `consumer.Consumer` take calls of the engine, messages, outcomes and
the time, and answer with orders; sockets, threads, memory and clocks are around them (`transfer.driver`). A call raises
ValueError for a mistake of the caller, and then changes nothing; nothing that a peer sends raises. Neither side is safe
to use from two threads at once. docs/transfer.md has the rules.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from transfer.protocol.messages import AnyMessage, Granted, Landed, TransferMessage

if TYPE_CHECKING:
    from transfer.plan.granularity import Batch
    from transfer.protocol.incoming import Incoming
    from transfer.protocol.outgoing import Outgoing


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
    """For the consumer, until the producer ranks are found, and from the grant on while nothing arrives and prefill is
    over, or not begun."""
    hold_s: float = 300.0
    """For the producer, from the end of prefill to the release of its blocks, whatever heartbeats come. For the
    consumer, until it has blocks, and from then on while prefill is not over."""


@dataclass(slots=True, eq=False)
class Transfer:
    """The one record of a transfer in a rank's process; each is one object, whatever its name.

    Whoever speaks for the engine makes it, names it in every call, and gets it back with `Ended`. In between only the
    protocol changes it.
    """

    name: str
    request: str = ""
    """What the engine calls it; the protocol does not read it."""
    prompt: bytes = b""
    """A digest of the tokens whose KV it has; empty where the engine does not say, or the name does."""
    started_s: float = 0.0
    ended_s: float = 0.0
    """When `ending` was known, at the consumer; when `Ended` was given, at the producer."""
    ending: Ending | None = None
    cause: str = ""
    nbytes: int = 0
    """KV that was written to peers, or that arrived and was right."""
    seconds: float = 0.0
    """From its beginning to `Ended`."""
    spoken: bool = False
    """The engine has said its last word: finished, granted or cancelled. There is no `Ended` before."""
    is_over: bool = False
    """`Ended` was given."""

    @property
    def transport(self) -> str:
        """How it travelled; "" where nothing did or at the consumer, which is not told."""
        return ""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message; it may get lost."""

    peer: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Write:
    """Producer: copy a batch into what was granted, take its checksums, and call `Producer.written` exactly once."""

    peer: str
    transfer: Outgoing
    granted: Granted
    number: int
    batch: Batch
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """Producer: writes of this transfer to this peer may be dropped or cancelled; each is still reported."""

    peer: str
    transfer: Outgoing


@dataclass(frozen=True, slots=True)
class Verify:
    """Consumer: compare a batch with its checksums, and call `Consumer.verified` once."""

    peer: str
    transfer: Incoming
    landed: Landed


@dataclass(frozen=True, slots=True)
class Revoke:
    """Consumer: end the grant of this transfer, and call `Consumer.revoked` when nothing can write to it any more."""

    transfer: Incoming


@dataclass(frozen=True, slots=True)
class Failed:
    """Consumer: nothing will come of this transfer, which has no grant; it ends when the engine grants or cancels."""

    transfer: Incoming


@dataclass(frozen=True, slots=True)
class Ended:
    """The transfer is over; its blocks are the engine's alone. Given exactly once for each transfer of an engine."""

    transfer: Outgoing | Incoming


Order: TypeAlias = Send | Write | Abandon | Verify | Revoke | Failed | Ended


class Protocol(ABC):
    """One side of the protocol in one process. Peers are processes: one that restarts is another peer."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._orders: list[Order] = []
        self._closed = ""

    def take(self) -> list[Order]:
        """The orders given since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders

    @abstractmethod
    def receive(self, peer: str, message: AnyMessage, now_s: float) -> None:
        """A message came; one that is meant for the other side does nothing."""

    @abstractmethod
    def tick(self, now_s: float) -> float | None:
        """Give the orders that are due. Call again after so many seconds, or, if None, after the next other call."""

    @abstractmethod
    def close(self, cause: str, now_s: float) -> None:
        """Nothing reads or writes the blocks any more: all transfers fail, and those that begin later at once."""

    def _send(self, peer: str, kind: type[TransferMessage], transfer: str, **fields: Any) -> None:
        self._orders.append(Send(peer, kind(transfer=transfer, **fields)))

    def _give_ended(self, transfer: Outgoing | Incoming, now_s: float) -> None:
        if not transfer.is_over:
            transfer.is_over, transfer.seconds = True, now_s - transfer.started_s
            self._orders.append(Ended(transfer))
