"""Giving pages of the pool to a tier, in the background: a thread for each tier, at its own place in the pool's feed.

So nothing is queued, however slow a tier is: what it has not been given is still in the pool, or was overtaken. A tier
that fell behind by more than the feed holds, and one that is new, is offered everything that the pool has, once. Pages
go straight from the arena; one that was evicted while the tier read it is removed from the tier again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

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
_CALM_BATCHES = 16
"""After so many that came in time, batches that were made smaller grow again."""
_TRIES = 3
"""Of a batch that the tier refuses without saying why, and of a page that alone takes too long. While a tier is full
or not there, nothing is given up but what the pool evicts."""
_TIDY_PERIOD_S = 60.0
_TIDY_S = 30.0


class Spread:
    """Gives one tier what its settings say it is to have. `run` is a job of the source's lane `gifts`."""

    def __init__(self, pool: EmbeddedStore, source: Source, stop: threading.Event) -> None:
        self._pool, self._source, self._stop = pool, source, stop
        self._bandwidth, self._batch = Bandwidth(source.settings.bandwidth), _Batch(source)
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
                self._offer(change, counted=False)

    def _give_reread(self) -> bool:
        changes = self._pool.reread(self._reread)
        for change in changes:
            self._offer(change, counted=True)
        return bool(changes)

    def _offer(self, change: Change, *, counted: bool) -> None:
        """Give what the tier does not have yet."""
        if self._space(change) is not None:
            self._give(self._absent(change), counted=counted)

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
        space = self._space(change)
        if space is None:
            return
        name, keys = SpaceName(change.namespace_digest, change.shard), change.keys
        if not self._source.settings.share:
            keys = tuple(key for key, brought in zip(keys, space.brought(keys), strict=True) if not brought)
        at = 0
        while at < len(keys) and not self._stop.is_set():
            some = keys[at : at + self._batch.pages(change.nbytes)]
            if _Gift(self._source, name, some, change.nbytes, counted).give(space, self._wait):
                self._batch.came()
                at += len(some)
            else:
                self._batch.took_too_long(len(some) * change.nbytes)

    def _space(self, change: Change) -> EmbeddedSpace | None:
        """Where its pages are; None for those that a tier is not to have."""
        space = self._pool.space_named(change.namespace_digest, change.shard)
        return None if space is None or space.is_private else space

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


class _Batch:
    """How much a tier is given in one call: what it asks for, or less where that took too long."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._bound: int | None = None
        self._calm = 0

    def pages(self, nbytes: int) -> int:
        """How many pages of `nbytes`."""
        most = self._source.batch_nbytes if self._bound is None else min(self._bound, self._source.batch_nbytes)
        return max(1, min(_MOST_PAGES, most // nbytes))

    def took_too_long(self, nbytes: int) -> None:
        self._bound, self._calm = nbytes // 2, 0

    def came(self) -> None:
        self._calm += 1
        if self._bound is not None and self._calm >= _CALM_BATCHES:
            bound, self._calm = 2 * self._bound, 0
            self._bound = bound if bound < self._source.batch_nbytes else None


class _Gift:
    """One batch of pages on its way into a tier."""

    def __init__(self, source: Source, name: SpaceName, keys: Sequence[bytes], nbytes: int, counted: bool) -> None:
        self._source, self._name, self._keys, self._nbytes = source, name, keys, nbytes
        self._counted = counted
        self._puts: dict[int, Put] = {}
        self._shown: set[int] = set()
        self._cause = ""
        """Why the last try failed."""

    def give(self, space: EmbeddedSpace, wait: Callable[[int], bool]) -> bool:
        """False where it took too long: fewer pages at a time may not."""
        tally = self._source.tally
        errors = 0
        while errors < _TRIES:
            if not wait(len(self._keys) * self._nbytes):
                return True
            self._shown.clear()
            self._cause = ""
            stayed = space.show(self._keys, self._write, nbytes=self._nbytes)
            if not self._cause:
                break
            if self._cause in ("timeout", "hanging") and len(self._shown) > 1:
                return False
            errors += self._cause in ("error", "timeout")  # the pages' fault, maybe; whatever else it is passes
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
        return True

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
