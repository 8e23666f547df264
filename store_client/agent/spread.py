"""Giving pages of the pool to a tier, in the background: a thread for each tier, at its own place in the pool's feed.

So nothing is queued, however slow a tier is: what it has not been given is still in the pool, or was overtaken. A tier
that fell behind by more than the feed holds, and one that is new, is offered everything that the pool has, once. Pages
go straight from the arena; one that was evicted while the tier read it is removed from the tier again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.log import get_logger
from store_client.agent.budget import Bandwidth
from store_client.agent.source import Source
from store_client.base import Change, Pieces, Position, Put
from store_client.embedded import EmbeddedSpace, EmbeddedStore
from store_client.embedded.present import Reread
from store_client.tiers.base import Sealed, SpaceName
from store_client.tiers.seal import seal

logger = get_logger(__name__)

_POLL_S = 0.05
_REREAD_POLL_S = 1.0
_SURVEY_PAUSE_S = 0.01
_SURVEY_PAGES = 1024
_FEED_PAGES = 512
_MOST_PAGES = 512
"""In one call of the tier."""
_TRIES = 3
"""Of a batch that the tier refuses without saying why. While a tier is full or not there, nothing is given up but what
the pool evicts."""
_TIDY_PERIOD_S = 60.0
_TIDY_S = 30.0


class Spread:
    """Gives one tier what its settings say it is to have. `run` is a job of the source's lane `gifts`."""

    def __init__(self, pool: EmbeddedStore, source: Source, stop: threading.Event) -> None:
        self._pool, self._source, self._stop = pool, source, stop
        self._bandwidth = Bandwidth(source.settings.bandwidth)
        self._position: Position | None = None
        self._reread = Reread()
        self._memory = pool.memory
        """As the tier was told."""
        self._next_tidy_s = time.monotonic() + _TIDY_PERIOD_S

    def run(self) -> None:
        rule = self._source.settings.write
        while not self._stop.is_set():
            gave = self._follow() if rule == "all" else self._give_reread() if rule == "reused" else False
            self._tidy()
            self._register()
            if not gave:
                self._stop.wait(_POLL_S if rule == "all" else _REREAD_POLL_S)

    def _follow(self) -> bool:
        """Give what is new; whether there was something."""
        news = self._pool.changes(self._position, _FEED_PAGES)
        if news.gap:
            self._position = news.position
            self._survey()
            return False
        for change in news.changes:
            if change.stored:
                self._give(change, counted=True)
        if self._stop.is_set():
            return False
        self._position = news.position
        return bool(news.changes)

    def _survey(self) -> None:
        """Offer all that the pool has, slowly."""
        at: int | None = 0
        while at is not None and not self._stop.wait(_SURVEY_PAUSE_S):
            changes, at = self._pool.pages_at(at, _SURVEY_PAGES)
            for change in changes:
                self._give(self._absent(change), counted=False)

    def _give_reread(self) -> bool:
        changes = self._pool.reread(self._reread)
        for change in changes:
            self._give(self._absent(change), counted=True)
        return bool(changes)

    def _absent(self, change: Change) -> Change:
        """Without the pages that the tier says it has."""
        name, tier = SpaceName(change.namespace_digest, change.shard), self._source.tier
        self._wait_until_allowed()
        found, _, _ = self._source.call(
            self._source.gifts, self._source.writes,
            lambda deadline_s: tier.contains(name, change.keys, nbytes=change.nbytes, deadline_s=deadline_s),
        )  # fmt: skip
        if found is None or len(found) != len(change.keys):
            return change
        self._source.tally.add(present_pages=sum(found))
        keys = tuple(key for key, there in zip(change.keys, found, strict=True) if not there)
        return Change(True, change.namespace_digest, change.shard, change.nbytes, keys)

    def _give(self, change: Change, *, counted: bool) -> None:
        """`counted`: pages that the pool has lost meanwhile were overtaken."""
        space = self._space(change.namespace_digest, change.shard)
        if space is None:
            return
        name = SpaceName(change.namespace_digest, change.shard)
        step = max(1, min(_MOST_PAGES, self._source.batch_nbytes // change.nbytes))
        for at in range(0, len(change.keys), step):
            keys = change.keys[at : at + step]
            if not self._source.settings.share:
                keys = tuple(key for key, brought in zip(keys, space.brought(keys), strict=True) if not brought)
            if keys:
                _Gift(self._source, name, keys, change.nbytes, counted).give(space, self._wait)
            if self._stop.is_set():
                return

    def _space(self, digest: bytes, shard: Shard) -> EmbeddedSpace | None:
        return self._pool.space_named(digest, shard)

    def _wait(self, nbytes: int) -> bool:
        """Until so many bytes may be written; False where it ends before."""
        self._wait_until_allowed()
        return not self._stop.wait(self._bandwidth.wait_s(nbytes, time.monotonic()))

    def _wait_until_allowed(self) -> None:
        while not self._source.writes.allows(time.monotonic()) and not self._stop.wait(_POLL_S):
            self._tidy()

    def _register(self) -> None:
        """Tell the tier where the arena is mapped, once the pool has grown."""
        memory, tier = self._pool.memory, self._source.tier
        if memory is not None and memory is not self._memory:
            self._memory = memory
            self._source.call(self._source.gifts, self._source.writes, lambda _: tier.register(memory))

    def _tidy(self) -> None:
        now = time.monotonic()
        if now < self._next_tidy_s or not self._source.writes.allows(now):
            return
        tier = self._source.tier
        self._source.call(self._source.gifts, self._source.writes, lambda _: tier.tidy(_TIDY_S), _TIDY_S)
        self._next_tidy_s = time.monotonic() + _TIDY_PERIOD_S


class _Gift:
    """One batch of pages on its way into a tier."""

    def __init__(self, source: Source, name: SpaceName, keys: Sequence[bytes], nbytes: int, counted: bool) -> None:
        self._source, self._name, self._keys, self._nbytes = source, name, keys, nbytes
        self._counted = counted
        self._puts: dict[int, Put] = {}
        self._shown: set[int] = set()
        self._cause = ""
        """Why the last try failed."""

    def give(self, space: EmbeddedSpace, wait: Callable[[int], bool]) -> None:
        tally = self._source.tally
        errors = 0
        while errors < _TRIES:
            if not wait(len(self._keys) * self._nbytes):
                return
            self._shown.clear()
            self._cause = ""
            stayed = space.show(self._keys, self._write, nbytes=self._nbytes)
            if not self._cause:
                break
            errors += self._cause == "error"  # the pages' fault, maybe; whatever else it is passes
        if self._counted:
            tally.add(overtaken_pages=len(self._keys) - len(self._shown))
        stored = [i for i, put in self._puts.items() if put is Put.STORED]
        moved = [self._keys[i] for i in stored if not stayed[i]]
        right = len(stored) - len(moved)
        tally.add(
            written_pages=right, written_nbytes=right * self._nbytes,
            present_pages=sum(put is Put.PRESENT for put in self._puts.values()),
        )  # fmt: skip
        for put in self._puts.values():
            if put is Put.FAILED:
                tally.failed("refused")
        if moved:
            self._take_back(moved)

    def _write(self, pages: Iterable[tuple[int, Pieces, int]]) -> None:
        source, name, secret = self._source, self._name, self._source.secret
        numbers, sealed = [], []
        for i, pieces, checksum in pages:
            numbers.append(i)
            sealed.append(Sealed(self._keys[i], pieces, seal(name, self._keys[i], pieces, checksum, secret)))
        self._shown.update(numbers)
        puts, cause, seconds = source.call(
            source.gifts, source.writes,
            lambda deadline_s: source.tier.write(name, sealed, nbytes=self._nbytes, deadline_s=deadline_s),
        )  # fmt: skip
        source.tally.took("write_s", seconds)
        if puts is None or len(puts) != len(numbers):
            self._cause = cause or "error"
        else:
            self._puts.update(zip(numbers, puts, strict=True))

    def _take_back(self, keys: Sequence[bytes]) -> None:
        """The pool gave their place to others while the tier read it, so what it has is not them, or may not be."""
        source = self._source
        source.tally.add(overtaken_pages=len(keys) if self._counted else 0)
        source.call(
            source.gifts, source.writes,
            lambda deadline_s: source.tier.remove(self._name, keys, deadline_s=deadline_s),
        )  # fmt: skip
