"""The record of a transfer in a rank of the decode instance, and what was said with each rank of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from transfer.plan.granularity import Batch
from transfer.plan.layout import Table
from transfer.protocol.messages import Landed
from transfer.protocol.orders import Transfer
from transfer.transports.base import Grant


@dataclass(frozen=True, slots=True)
class Where:
    """The directory of a prefill instance.

    Args:
        engine_id: which life of it has the KV; "" where the request does not say.
    """

    host: str
    port: int
    engine_id: str = ""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


@dataclass(frozen=True, slots=True)
class Source:
    """A rank of the prefill instance that has a route to this rank (`transfer.plan.pairing.routes`).

    Args:
        layers: what it sends of each section; all empty where it only has to be told that the transfer is over.
        destinations: how many ranks of this rank's instance have a route from it.
    """

    peer: str
    layers: Sequence[range]
    destinations: int

    def sends(self, section: int, wanted: Table) -> range:
        """The tokens of a section that it sends where those of this table are wanted."""
        return wanted.tokens


@dataclass(slots=True)
class Got:
    """A batch that landed, and what it has; `right` is None while it is being checked."""

    landed: Landed
    part: Batch
    right: bool | None = None


@dataclass(slots=True)
class Session:
    source: Source
    send_s: float
    heard_s: float
    accepted: bool = False
    """The producer has the grant."""
    batches: dict[int, Got] = field(default_factory=dict)
    verified: int = 0
    places: int = 0
    """Layers times tokens that are granted, of all sections."""
    done: bool = False
    closed: bool = False
    """The producer knows that we are through, or is gone."""

    def again(self) -> list[int]:
        return [number for number, got in self.batches.items() if got.right is False]


@dataclass(slots=True, eq=False)
class Incoming(Transfer):
    """A transfer whose KV another instance has or computes.

    `computed`: the request was at the producer first, which must know the transfer.
    """

    where: Where = Where("", 0)
    computed: bool = False
    is_found: bool = False
    """Its sources are known, or that there are none."""
    sessions: dict[str, Session] = field(default_factory=dict)
    deadline_s: float = 0.0
    patient_until_s: float = 0.0
    """While prefill is not over, the deadline moves on, but not beyond this."""
    number: int = 0
    """Of the transfers that were announced in this process."""
    earlier: Incoming | None = None
    """One of its name that was over when this one began."""
    is_granted: bool = False
    tables: Sequence[Table] = ()
    """What was granted of each of this rank's sections."""
    key: bytes = b""
    memory: Grant | None = None
    """The transport's grant of the blocks; the driver's."""

    def is_known_by(self, peer: str) -> bool:
        """Whether a producer rank knows that this transfer is over, or has no part in it.

        Where no rank was found nobody was told anything, and it may be open there.
        """
        return bool(self.sessions) and (peer not in self.sessions or self.sessions[peer].closed)

    def may_be_told(self, peer: str) -> bool:
        """Whether a producer rank may hear of this transfer, be it of its end: it could take it for an earlier one."""
        return self.earlier is None or self.earlier.is_known_by(peer)
