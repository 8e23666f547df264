"""One batch on its way from a tier into the pool: read into the arena, verified where it lies, published.

What a tier said it has and does not give, and what it gives that is not the page, are misses and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import xxhash

from mooncake_connector.log import get_logger, log_once
from store_client.agent.chain import BEHIND, LANDED, Batch
from store_client.agent.clerk import Clerk
from store_client.agent.source import Source
from store_client.base import Pieces, Put
from store_client.embedded import EmbeddedStore
from store_client.tiers.base import Target
from store_client.tiers.seal import why_broken

logger = get_logger(__name__)

_LOCK_WAIT_S = 2.0
"""At most so long for the pool's write lock."""
_SHORTEST_READ_S = 0.05


class Landing:
    """Args:
    may_publish: called with the batch and until when, once its pages are right; says why they must not be published.
    until: when they have to be there.
    """

    def __init__(self, may_publish: Callable[[Batch, float], str], source: Source, batch: Batch, until: float) -> None:
        self._may_publish, self._source, self._batch, self._until = may_publish, source, batch, until
        self._causes: dict[int, str] = {}
        """Of pages that had a place in the pool, why they are not stored."""
        self._placed = 0
        self._corrupt: list[bytes] = []

    def run(self, pool: EmbeddedStore, follows: Sequence[bytes], clerk: Clerk) -> list[str]:
        """What became of each page, as `Plan.ended` takes it."""
        batch, wish = self._batch, self._batch.wish
        wait_s = min(_LOCK_WAIT_S, max(_SHORTEST_READ_S, self._until - time.monotonic()))
        give_up_s = time.monotonic() + wait_s
        puts = pool.space(wish.namespace, wish.shard).receive(
            batch.keys, self._fill, nbytes=wish.nbytes, parents=batch.parents, deadline_s=wait_s, follows=follows,
            clears=batch.clears, locked=clerk.run,
        )  # fmt: skip
        if pool.clears != batch.clears:
            without = "forgotten"
        else:
            without = "no_room" if self._placed or time.monotonic() < give_up_s else "busy"
        return [self._causes.get(i) or without if put is Put.FAILED else LANDED for i, put in enumerate(puts)]

    def _fill(self, places: Sequence[tuple[int, Pieces]]) -> list[int | None]:
        self._placed += len(places)
        hole = bool(self._causes)
        checksums = self._read(places)
        for at, (i, _) in enumerate(places):
            if hole and checksums[at] is not None:
                checksums[at], self._causes[i] = None, BEHIND
            hole = hole or checksums[at] is None
        if not any(checksum is not None for checksum in checksums):
            return checksums
        refusal = self._may_publish(self._batch, self._until)
        if refusal:
            for i, _ in places:
                self._causes.setdefault(i, refusal)
            return [None] * len(places)
        return checksums

    def _read(self, places: Sequence[tuple[int, Pieces]]) -> list[int | None]:
        """Have the tier fill the places; the checksum of each page whose seal fits."""
        source, wish, keys = self._source, self._batch.wish, self._batch.keys
        targets = [Target(keys[i], pieces) for i, pieces in places]
        before = source.fetches.busy
        seals, cause, seconds = source.call(
            source.fetches, source.reads,
            lambda deadline_s: source.tier.read(wish.space, targets, nbytes=wish.nbytes, deadline_s=deadline_s),
            max(_SHORTEST_READ_S, self._until - time.monotonic()),
        )  # fmt: skip
        if seals is None or len(seals) != len(places):
            self._causes.update((i, cause or "error") for i, _ in places)
            return [None] * len(places)
        came = sum(seal is not None for seal in seals)
        if came:
            source.speed.read(came * wish.nbytes, seconds, (before + source.fetches.busy) / 2, time.monotonic())
        source.tally.took("fetch_s", seconds)
        checksums = [self._checked(i, pieces, seal) for (i, pieces), seal in zip(places, seals, strict=True)]
        right = sum(checksum is not None for checksum in checksums)
        source.tally.add(
            fetched_pages=right, fetched_nbytes=right * wish.nbytes, undelivered_pages=len(seals) - came,
            corrupt_pages=came - right,
        )  # fmt: skip
        return checksums

    def _checked(self, i: int, pieces: Pieces, seal: bytes | None) -> int | None:
        if seal is None:
            self._causes[i] = "undelivered"
            return None
        wish, key = self._batch.wish, self._batch.keys[i]
        checksum = digest(pieces)
        why = why_broken(seal, wish.space, key, pieces, checksum, self._source.secret)
        if why is None:
            return checksum
        self._causes[i] = "corrupt"
        self._corrupt.append(key)
        said = "tier %s: what it gave for page %s is not that page (%s); computed again, and removed from the tier"
        log_once(f"tier.{self._source.title}.corrupt", said, self._source.title, key.hex(), why, logger=logger)
        return None

    def remove_corrupt(self) -> None:
        if self._corrupt:
            source, space = self._source, self._batch.wish.space
            source.call(
                source.fetches, source.reads,
                lambda deadline_s: source.tier.remove(space, self._corrupt, deadline_s=deadline_s),
            )  # fmt: skip


def digest(pieces: Pieces) -> int:
    """XXH3-64 of a page."""
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0].data)
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece.data)
    return state.intdigest()
