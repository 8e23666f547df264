"""A put: the pages that are to be stored, and where in the pool each of them is being written."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.embedded.allocator import Piece
from store_client.embedded.ledger import Reservation
from store_client.embedded.row import INLINE_EXTENTS


@dataclass(frozen=True, slots=True)
class PutPages:
    """Pages of one size, namespace and shard, by key, and the page before each in its chain."""

    namespace: Namespace
    shard: Shard
    keys: Sequence[bytes]
    parents: Sequence[bytes | None]
    nbytes: int
    follows: Collection[bytes] = ()
    """Keys of pages that somebody stores meanwhile: a page that hangs on one of them is not an orphan."""
    rests_on: Collection[bytes] = ()
    """Keys of pages that those of `follows` hang on: their chains are not to go either."""
    clears: int | None = None
    """Not to be stored once pages were cleared more often than this; None: whatever was cleared."""
    mark: int = 0
    """Of the page table, for all of them."""
    used_ns: Sequence[int] | None = None
    """When each page was last used (`table.now_ns()`), for pages that come back from a copy of the pool: they take free
    space only, and neither they nor their chains count as used by it. None: they are used now."""

    def part(self, start: int, stop: int, coming: Sequence["PutPlan"]) -> "PutPages":
        """Some of them, which are stored while those are not published yet that have places in these plans."""
        follows, rests_on = list(self.follows), []
        for plan in coming:
            indices = [place.index for place in plan.places]
            follows += [plan.pages.keys[i] for i in indices]
            rests_on += plan.pages.parents_of(indices)
        keys, parents = self.keys[start:stop], self.parents[start:stop]
        return replace(self, keys=keys, parents=parents, follows=follows, rests_on=rests_on)

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
