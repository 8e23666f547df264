"""What every tier offers. The agent calls it from its own threads, a batch at a time; no engine ever does.

A tier holds pages by name, each with a seal (`store_client.tiers.seal`), and may forget any of them at any time. It
moves bytes and does not look at them: the agent makes seals, and holds what it reads against them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.kv.geometry import Shard
from store_client.base import Bytes, Put
from store_client.base import Pieces as Pieces

SEAL_NBYTES = 64


class TierError(MooncakeConnectorError):
    """A tier, or a call of it as a whole, that failed. The agent counts `cause` and leaves the tier alone for a while.

    Args:
        cause: one word for the metrics: "unavailable", "timeout", "full", "denied", "version", "error".
        lasting: trying again will not help before a person has done something.
    """

    def __init__(self, text: str, cause: str = "error", *, lasting: bool = False) -> None:
        super().__init__(text)
        self.cause, self.lasting = cause, lasting


class SpaceName(NamedTuple):
    """Whose pages: one namespace (its 32-byte digest) and one shard of it."""

    namespace: bytes
    shard: Shard


class Sealed(NamedTuple):
    """A page that is given to a tier."""

    key: bytes
    pieces: Pieces
    """Read-only uint8; they may lie in the mapped arena, and stay as they are during the call only."""
    seal: bytes
    """SEAL_NBYTES."""


class Target(NamedTuple):
    """Where a page is wanted."""

    key: bytes
    pieces: Pieces
    """Writable uint8, together of the page's size."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier says of itself; None where it does not know."""

    capacity_nbytes: int | None = None
    used_nbytes: int | None = None
    pages: int | None = None
    evicted_pages: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    """Further facts for people, such as the master's address."""


class Purged(NamedTuple):
    """What a purge deleted."""

    pages: int
    nbytes: int
    """Of the pages, as far as the tier knows."""


class Tier(ABC):
    """Calls may come from several threads at once, and each returns or raises TierError by its `deadline_s` (seconds
    from now), as well as the tier can see to it. Nothing else is raised, but ValueError for a caller's own mistake.
    """

    batch_nbytes: int = 32 << 20
    """So much at a time suits it. Of half of it the agent's own work for a batch takes a tenth of a fast tier's speed,
    and threads of a tier that have no page of a batch left wait for a third of the time."""
    parallel: int = 2
    """Calls at once that suit it."""
    needs_mac: bool = False
    """Whether others than this deployment may write there, so that seals must carry a MAC."""

    def register(self, memory: Bytes) -> None:  # noqa: B027 - most tiers need nothing
        """All pieces of later calls may lie in this memory, which stays mapped until `close`. Called again where the
        pool has grown, with a longer mapping at another address, in which later pieces lie then."""

    @abstractmethod
    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        """For each key whether a page of `nbytes` seems to be there."""

    @abstractmethod
    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        """Fill the pieces of each page that is there; its seal, or None for a miss, whose pieces may hold anything."""

    @abstractmethod
    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        """Store the absent pages. A reader finds a page whole or not at all."""

    @abstractmethod
    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        """Forget these pages; return how many there were, as far as the tier knows."""

    @abstractmethod
    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        """Forget all pages of this package, or of one namespace; nobody else's. Return how many there were."""

    @abstractmethod
    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        """The shards of a namespace of which there seem to be pages, or were a while ago; cheap, and in no order. One
        may be left out, and be told later."""

    def purge(
        self,
        namespace: bytes | None,
        *,
        older_than_s: float | None = None,
        larger_than_nbytes: int | None = None,
        deadline_s: float,
    ) -> Purged:
        """Forget the pages that all conditions given apply to: of one namespace, written longer ago than this by the
        tier's own clock, of more bytes than this. Any number of hosts may do it at once."""
        if older_than_s is not None or larger_than_nbytes is not None:
            raise TierError("this kind of tier purges by namespace alone", "error", lasting=True)
        return Purged(self.clear(namespace, deadline_s=deadline_s), 0)

    @abstractmethod
    def stats(self) -> TierStats:
        """Cheap; raises TierError where the tier cannot say."""

    def tidy(self, deadline_s: float) -> None:  # noqa: B027
        """Called now and then, from a thread that has time: garbage, retention, limits."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; may be called twice. No call is under way."""
