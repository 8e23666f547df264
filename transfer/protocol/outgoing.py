"""The record of a transfer in a rank of the prefill instance, and what was said with each rank of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.plan.granularity import Batch, Divider
from transfer.protocol.messages import Granted, State
from transfer.protocol.orders import Ending, Transfer


@dataclass(slots=True)
class Sent:
    """A batch; `checksums` is None while it is being written."""

    batch: Batch
    attempt: int = 0
    checksums: Sequence[int] | None = None


class Progress(NamedTuple):
    """All layers of a section up to this one have the KV of the tokens before `stop_token`."""

    section: int
    layer: int
    stop_token: int


@dataclass(slots=True)
class Session:
    peer: str
    number: int
    """The consumer's, of what it announced."""
    prompt: bytes
    """The consumer's."""
    heard_s: float
    send_s: float
    destinations: int = 0
    """Ranks of the consumer's instance that have a route from here; 0 while unknown."""
    granted: Granted | None = None
    dividers: list[Divider] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    verified: int = 0
    writing: set[int] = field(default_factory=set)
    """Batches that a write reads."""
    state: State = State.OPEN
    ending: Ending | None = None
    cause: str = ""

    @property
    def unheard(self) -> list[int]:
        """Batches that landed and that the consumer has not confirmed."""
        return [n for n in range(self.verified, len(self.sent)) if self.sent[n].checksums is not None]


@dataclass(slots=True, eq=False)
class Outgoing(Transfer):
    """A transfer whose KV is computed here, or that consumers ask for before the engine names it."""

    block_tables: Sequence[Sequence[int]] = ()
    """Of each of this rank's sections, as they are now."""
    opened: bool = False
    heard_s: float = 0.0
    sessions: dict[str, Session] = field(default_factory=dict)
    former: dict[str, int] = field(default_factory=dict)
    """Of each consumer rank, the last number that was of an earlier transfer of this name."""
    progress: list[Progress] = field(default_factory=list)
    run: int = 0
    """How often its prefill was begun again."""
    finished_s: float | None = None
    num_tokens: int = 0
    """That it has KV of, once it is finished."""
    transports: set[str] = field(default_factory=set)
    follower: Outgoing | None = None
    """The next of its name, which the engine has named before this one, whose end is known, was over."""

    @property
    def transport(self) -> str:
        return "+".join(sorted(self.transports))

    @property
    def expected(self) -> int:
        """Sessions that there will be; 0 while unknown."""
        return max((session.destinations for session in self.sessions.values()), default=0)

    def has_another_prompt(self, prompt: bytes) -> bool:
        """Than that of this digest; where either is not known, nothing is."""
        return bool(self.prompt and prompt) and self.prompt != prompt

    @property
    def is_being_left(self) -> bool:
        """It has ended, and is not over."""
        return self.opened and self.ending is not None and not self.is_over

    @property
    def may_be_followed(self) -> bool:
        """By another one of its name: nothing reads its blocks, and what its consumers may still say has a number."""
        return self.is_over and 0 < self.expected <= len(self.sessions)

    @property
    def numbers(self) -> dict[str, int]:
        """What `former` is of the next one."""
        return self.former | {peer: session.number for peer, session in self.sessions.items()}

    def last_number(self, peer: str) -> int:
        """The last one that this consumer rank was heard of; 0 for none."""
        return self.sessions[peer].number if peer in self.sessions else self.former.get(peer, 0)

    def wanted_by(self, peer: str) -> bool:
        """Whether what is being written to the peer is of use."""
        return self.sessions[peer].state is State.OPEN
