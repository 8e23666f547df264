"""What a put is asked to store, and what it holds between reserving space and publishing pages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.embedded.allocator import Piece
from store_client.embedded.ledger import Reservation
from store_client.embedded.rows import INLINE_EXTENTS


@dataclass(frozen=True, slots=True)
class PutPages:
    """Pages of one size, namespace and shard, by key, and the page before each in its chain."""

    namespace: Namespace
    shard: Shard
    keys: Sequence[bytes]
    parents: Sequence[bytes | None]
    nbytes: int

    def parents_of(self, indices: Iterable[int]) -> list[bytes]:
        """Keys of the parents that these pages have, each once."""
        return sorted({parent for i in indices if (parent := self.parents[i]) is not None})


@dataclass(slots=True)
class Place:
    """Where one page of a put is being written."""

    index: int
    """Position in the keys."""
    slot: int
    extents: list[Piece]
    checksum: int | None = None
    """None until its bytes are complete."""

    @property
    def is_listed(self) -> bool:
        """Whether its row has no room for its extents; the first one is then a granule for a list of the others."""
        return len(self.extents) > INLINE_EXTENTS


@dataclass(frozen=True, slots=True)
class PutPlan:
    """A reservation, the pages it is for, and what became of the other pages: "present", or why they have no place."""

    pages: PutPages
    reservation: Reservation | None
    places: list[Place]
    outcome: dict[int, str]
