"""Giving pages of the pool to a tier, in the background: a few threads for each tier, which follow the feed together.

So nothing is queued, however slow a tier is: what it has not been given is still in the pool, or was overtaken. A tier
that fell behind by more than the feed holds, and one that is new, is offered everything that the pool has, once. The
threads take one batch after the other, in the feed's order, so as many are under way as suit the tier.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from mooncake_connector.log import get_logger, log_once
from store_client.agent.budget import Bandwidth
from store_client.agent.gift import BatchSize, Gift
from store_client.agent.late import Late
from store_client.agent.source import Source
from store_client.base import Change, Position
from store_client.embedded import EmbeddedSpace, EmbeddedStore
from store_client.embedded.present import Reread
from store_client.tiers.base import SpaceName

logger = get_logger(__name__)

_SHORTEST_POLL_S, _POLL_S = 0.001, 0.05
"""Right after there was something to give, and in the end."""
_REREAD_POLL_S = 1.0
_SURVEY_PAUSE_S = 0.01
_SURVEY_PAGES = 1024
_FEED_PAGES = 512
_TIDY_PERIOD_S = 60.0
_TIDY_S = 30.0


class _Task(NamedTuple):
    """Pages for one thread."""

    space: EmbeddedSpace
    change: Change
    is_new: bool
    """Just stored, so the tier is not asked whether it has them."""
    counted: bool
    """Pages that the pool has lost meanwhile were overtaken."""


class Spread:
    """Gives one tier what its settings say it is to have, in jobs of the source's lane `gifts`."""

    def __init__(self, pool: EmbeddedStore, source: Source, stop: threading.Event) -> None:
        self._pool, self._source, self._stop = pool, source, stop
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._bandwidth, self._size = Bandwidth(source.settings.bandwidth), BatchSize(source)
        self._tasks = self._find()
        self._memory = pool.memory
        """As the tier was told."""
        self._next_tidy_s = time.monotonic() + _TIDY_PERIOD_S
        self._threads = 0

    def start(self) -> None:
        """Have as many threads as suit the tier. One that opens late says only then how many do."""
        gifts = self._source.gifts
        with self._lock:
            gifts.width = max(gifts.width, self._source.gifts_at_once)
            missing, self._threads = gifts.width - self._threads, gifts.width
        for _ in range(missing):
            cause = gifts.run(self._run, self._gives_less)
            if cause:
                self._gives_less(cause)

    def _gives_less(self, cause: str) -> None:
        if cause not in ("closed", "hanging"):  # which is told where it is noticed
            title, said = self._source.title, "tier %s gets fewer pages at once than suit it, or none: %s"
            log_once(f"tier.{title}.gives", said, title, cause, logger=logger)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._threads < self._source.gifts_at_once:
                self.start()
            with self._turn:
                try:
                    task = next(self._tasks)
                except StopIteration:
                    return
            self._tidy()
            self._remove_late()
            self._register()
            if task is not None:
                self._give(task)

    # -- what there is to give: by one thread at a time, which calls no tier ------------------------------------

    def _find(self) -> Iterator[_Task | None]:
        """Waits where there is nothing to give, and says None then."""
        rule = self._source.settings.write
        if rule == "all":
            yield from self._follow()
        reread = Reread()
        while not self._stop.is_set():
            if rule == "reused":
                for change in self._pool.reread(reread):
                    yield from self._tasks_of(change, is_new=False, counted=True)
            self._stop.wait(_REREAD_POLL_S)
            yield None

    def _follow(self) -> Iterator[_Task | None]:
        position: Position | None = None
        poll_s = _SHORTEST_POLL_S
        while not self._stop.is_set():
            news = self._pool.changes(position, _FEED_PAGES)
            position = news.position
            if news.gap:
                yield from self._survey()
            tasks = [
                task for change in news.changes if change.stored
                for task in self._tasks_of(change, is_new=True, counted=True)
            ]  # fmt: skip
            yield from tasks
            if tasks:
                poll_s = _SHORTEST_POLL_S
            elif sum(len(change.keys) for change in news.changes) < _FEED_PAGES:
                self._stop.wait(poll_s)
                poll_s = min(2 * poll_s, _POLL_S)
                yield None

    def _survey(self) -> Iterator[_Task]:
        """Offer all that the pool has, slowly."""
        at: int | None = 0
        while at is not None and not self._stop.wait(_SURVEY_PAUSE_S):
            changes, at = self._pool.pages_at(at, _SURVEY_PAGES)
            for change in changes:
                yield from self._tasks_of(change, is_new=False, counted=False)

    def _tasks_of(self, change: Change, *, is_new: bool, counted: bool) -> Iterator[_Task]:
        """Without pages that the tier is not to have. What is new comes in batches, a share for each thread."""
        space = self._pool.space_named(change.namespace_digest, change.shard)
        if space is None or space.is_private:
            return
        keys = change.keys
        if not self._source.settings.share:
            keys = tuple(key for key, brought in zip(keys, space.brought(keys), strict=True) if not brought)
        step = self._size.pages(change.nbytes) if is_new else max(1, len(keys))
        for at in range(0, len(keys), step):
            yield _Task(space, _some(change, keys[at : at + step]), is_new, counted)

    # -- giving it: by several threads at once ------------------------------------------------------------------

    def _give(self, task: _Task) -> None:
        change = task.change if task.is_new else self._absent(task.change)
        name, keys, nbytes = SpaceName(change.namespace_digest, change.shard), change.keys, change.nbytes
        at = 0
        while at < len(keys) and not self._stop.is_set():
            some, clears = keys[at : at + self._size.pages(nbytes)], self._pool.clears
            gift = Gift(self._source, name, some, nbytes, task.counted)
            came = gift.give(task.space, self._wait)
            self._source.late_writes.note(Late(name, gift.unsure, clears), time.monotonic())
            if came:
                self._size.came()
                at += len(some)
            else:
                self._size.took_too_long(len(some) * nbytes)

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
        return _some(change, tuple(key for key, there in zip(change.keys, found, strict=True) if not there))

    def _wait(self, nbytes: int) -> bool:
        """Until so many bytes may be written; False where it ends before."""
        self._wait_until_allowed()
        with self._lock:
            wait_s = self._bandwidth.wait_s(nbytes, time.monotonic())
        return not self._stop.wait(wait_s)

    def _wait_until_allowed(self) -> None:
        while not self._source.writes.allows(time.monotonic()) and not self._stop.wait(_POLL_S):
            pass

    def _register(self) -> None:
        """Tell the tier where the arena is mapped, once the pool has grown."""
        memory, tier = self._pool.memory, self._source.tier
        with self._lock:
            if memory is None or memory is self._memory:
                return
            self._memory = memory
        self._source.call(self._source.gifts, self._source.writes, lambda _: tier.register(memory))

    def _remove_late(self) -> None:
        """What the tier was given without an answer, and was cleared since."""
        source = self._source
        late = source.late_writes.due(time.monotonic())
        if late is None or late.clears == self._pool.clears:
            return
        space = self._pool.space_named(late.name.namespace, late.name.shard)
        here = [False] * len(late.keys) if space is None else space.contains(late.keys)
        keys = [key for key, is_here in zip(late.keys, here, strict=True) if not is_here]
        if not keys:
            return
        _, cause, _ = source.call(
            source.gifts, source.writes,
            lambda deadline_s: source.tier.remove(late.name, keys, deadline_s=deadline_s),
        )  # fmt: skip
        if cause:
            source.late_writes.note(late._replace(keys=keys), time.monotonic())

    def _tidy(self) -> None:
        now, tier = time.monotonic(), self._source.tier
        with self._lock:
            if now < self._next_tidy_s or not self._source.writes.allows(now):
                return
            self._next_tidy_s = now + _TIDY_S + _TIDY_PERIOD_S
        self._source.call(self._source.gifts, self._source.writes, lambda _: tier.tidy(_TIDY_S), _TIDY_S)
        self._next_tidy_s = time.monotonic() + _TIDY_PERIOD_S


def _some(change: Change, keys: tuple[bytes, ...]) -> Change:
    return Change(True, change.namespace_digest, change.shard, change.nbytes, keys)
