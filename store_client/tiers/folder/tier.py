"""A folder that several hosts mount, as a tier: no lock, no coordinator, and no host's clock.

Whatever the mount does, a call ends by its deadline: operations that hang are left behind, with the thread that they
hold, and touch neither the caller's memory nor the folder's pages afterwards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from mooncake_connector.config.tiers import FolderTier
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.sizes import human_nbytes
from store_client.base import Put
from store_client.tiers.base import Purged, Sealed, SpaceName, Target, Tier, TierError, TierStats
from store_client.tiers.checks import check_keys, check_sealed, check_targets
from store_client.tiers.faults import as_tier_error
from store_client.tiers.folder import layout
from store_client.tiers.folder.clock import ServerClock
from store_client.tiers.folder.files import Ticket, has_page, read_page, remove_page, write_page
from store_client.tiers.folder.sweep import Sweep, Swept, is_due, remove_all, say_begun
from store_client.tiers.workers import Workers

AT_ONCE = 16
"""Operations under way at once: a network answers many as fast as one."""
USED_AGAIN_S = 6 * 3600.0
"""A page that is looked for is marked as used at most so often: each time is a request to the file server."""
LOOK_EVERY_S = 60.0
"""How often a host looks whether somebody should sweep."""
_OPEN_S = 30.0
_STEPS_SHARE = 0.5
"""Of the time of a call, so that the step that it ends in has the rest."""
_MANY_WRITES = 0.05
"""A host that has written this part of the capacity does not wait for the next sweep's time."""

T = TypeVar("T")


class SharedFolder(Tier):
    """Raises TierError where the folder cannot be used."""

    needs_mac = True
    parallel = 4

    def __init__(self, settings: FolderTier, pool_name: str = "") -> None:
        self._title, self._root = f"tier {settings.title}", settings.path.expanduser()
        self._capacity = settings.capacity
        self._keep_s = None if settings.keep_days is None else settings.keep_days * 86400.0
        self._closed = False
        self._clock = ServerClock(self._root)
        self._lock, self._sweeping = threading.Lock(), threading.Lock()
        self._steps: Iterator[None] | None = None
        self._sweep: Sweep | None = None
        self._swept: Swept | None = None
        self._look_s = 0.0
        self._evicted = 0
        self._written_nbytes = self._written_pages = 0
        self._workers = Workers(f"folder-{settings.title}", AT_ONCE)
        try:
            self._one("opening it", self._open, _OPEN_S)
        except BaseException:
            self._workers.close()
            raise

    def _open(self) -> None:
        layout.claim(self._title, self._root)
        self._clock.ask()

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        check_keys(keys)
        folder = layout.space_folder(self._root, space)
        stale_before = (self._clock.now() or 0.0) - USED_AGAIN_S
        looks = [partial(has_page, layout.page_path(folder, key), nbytes, stale_before) for key in keys]
        found = self._all("looking for pages", looks, deadline_s, need_all=True)
        return [bool(one) for one in found]

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        check_targets(targets, nbytes)
        folder, tickets = layout.space_folder(self._root, space), [Ticket() for _ in targets]
        reads = [
            partial(read_page, layout.page_path(folder, target.key), target.pieces, ticket)
            for target, ticket in zip(targets, tickets, strict=True)
        ]
        try:
            return self._all("reading", reads, deadline_s)
        finally:
            for ticket in tickets:
                ticket.leave()

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        check_sealed(pages, nbytes)
        once = {page.key: page for page in reversed(pages)}
        folder, tickets = layout.space_folder(self._root, space), [Ticket() for _ in once]
        writes = [
            partial(write_page, layout.page_path(folder, page.key), page, ticket)
            for page, ticket in zip(once.values(), tickets, strict=True)
        ]
        try:
            done = dict(zip(once, self._all("writing", writes, deadline_s), strict=True))
        finally:
            for ticket in tickets:
                ticket.leave()
        outcome = [done.pop(page.key, Put.PRESENT) or Put.FAILED for page in pages]
        with self._lock:
            self._written_pages += outcome.count(Put.STORED)
            self._written_nbytes += outcome.count(Put.STORED) * nbytes
        return outcome

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        folder = layout.space_folder(self._root, space)
        removals = [partial(remove_page, layout.page_path(folder, key)) for key in keys]
        return sum(bool(one) for one in self._all("removing pages", removals, deadline_s, need_all=True))

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        removed = self.purge(namespace, deadline_s=deadline_s)
        if namespace is None:
            with self._lock:
                self._swept, self._written_pages, self._written_nbytes = Swept(0, 0, 0), 0, 0
        return removed.pages

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        return self._one("looking for shards", partial(layout.shards, self._root, namespace), deadline_s)

    def purge(
        self,
        namespace: bytes | None,
        *,
        older_than_s: float | None = None,
        larger_than_nbytes: int | None = None,
        deadline_s: float,
    ) -> Purged:
        """As `Tier.purge`; a page's age is that of its last use, as for `keep_days`."""

        def removing() -> Purged:
            self._check_mounted()
            before_s = None if older_than_s is None else self._clock.ask() - older_than_s
            removed = remove_all(self._root, namespace, before_s, larger_than_nbytes)
            self._check_mounted()  # what went away meanwhile comes back with its pages
            return removed

        return self._one("removing pages", removing, deadline_s)

    def stats(self) -> TierStats:
        """What the last sweep of this host has found, and what it wrote since."""
        self._check_open()
        with self._lock:
            swept, pages, nbytes = self._swept, self._written_pages, self._written_nbytes
        notes = {"path": str(self._root), "written by this host since the last sweep": human_nbytes(nbytes)}
        if swept is None:
            return TierStats(capacity_nbytes=self._capacity, evicted_pages=self._evicted, notes=notes)
        return TierStats(self._capacity, swept.nbytes + nbytes, swept.pages + pages, self._evicted, notes)

    def tidy(self, deadline_s: float) -> None:
        """A part of a sweep, as much as there is time for, if one is due."""
        give_up_s = time.monotonic() + deadline_s * _STEPS_SHARE
        self._one("sweeping", partial(self._go_on, give_up_s), deadline_s)

    def _go_on(self, give_up_s: float) -> None:
        self._check_mounted()
        if self._sweeping.acquire(blocking=False):  # a call that was left behind may still be at it
            try:
                self._sweep_until(give_up_s)
            finally:
                self._sweeping.release()

    def _sweep_until(self, give_up_s: float) -> None:
        if self._steps is None and not self._begin():
            return
        assert self._steps is not None and self._sweep is not None
        try:
            for _ in self._steps:
                if time.monotonic() > give_up_s:
                    return
        except OSError:
            self._steps = None
            raise
        self._steps = None
        with self._lock:
            self._swept = self._sweep.result
            self._evicted += self._sweep.result.removed if self._sweep.result else 0

    def _begin(self) -> bool:
        """Begin a sweep, if one is due."""
        busy = self._capacity is not None and self._written_nbytes > self._capacity * _MANY_WRITES
        if not busy and time.monotonic() < self._look_s:
            return False
        self._look_s = time.monotonic() + LOOK_EVERY_S
        if not busy and not is_due(self._root, self._clock.ask()):
            return False
        say_begun(self._root)
        with self._lock:
            self._written_pages = self._written_nbytes = 0
        self._sweep = Sweep(self._root, self._clock, self._capacity, self._keep_s)
        self._steps = iter(self._sweep)
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._workers.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"{self._title} is closed", "unavailable")

    def _one(self, doing: str, operation: Callable[[], T], deadline_s: float) -> T:
        self._check_open()
        (outcome,) = self._workers.run_or_leave([operation], deadline_s)
        if isinstance(outcome, BaseException):
            raise self._as_error(doing, outcome)
        return outcome

    def _all(
        self, doing: str, operations: Sequence[Callable[[], T]], deadline_s: float, *, need_all: bool = False
    ) -> list[T | None]:
        """What each returned, None for what was not done in time, if something was; or raises TierError."""
        self._check_open()
        if not operations:
            return []
        mounted, *outcome = self._workers.run_or_leave([self._check_mounted, *operations], deadline_s)
        faults = [one for one in (mounted, *outcome) if isinstance(one, BaseException)]
        worse = [one for one in faults if not isinstance(one, TimeoutError)]
        late = sum(isinstance(one, TimeoutError) for one in outcome)
        if worse or late == len(outcome) or (late and need_all):
            raise self._as_error(doing, (worse or faults)[0])
        return [None if isinstance(one, BaseException) else one for one in outcome]

    def _check_mounted(self) -> None:
        if not layout.is_mounted(self._root):
            raise TierError(
                f"{self._title}: {self._root / layout.PAGES} is gone: the folder is not mounted any more, or was "
                "deleted; mount it, or start the agent again",
                "unavailable",
            )  # fmt: skip

    def _as_error(self, doing: str, error: BaseException) -> BaseException:
        if isinstance(error, OSError):
            return as_tier_error(f"{self._title} ({self._root})", doing, error)
        return error
