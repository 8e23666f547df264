"""The disk as a tier.

A page can be read as soon as it was written. What was written is made to last (file first, then index) after a second
or 64 MiB, whichever comes first, so that a crash costs at most that much, and never a wrong page.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import lmdb

from mooncake_connector.config.tiers import DiskTier
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.log import get_logger, log_once
from mooncake_connector.sizes import human_nbytes
from store_client.base import Put
from store_client.tiers.base import Pieces, Sealed, SpaceName, Target, Tier, TierError, TierStats
from store_client.tiers.checks import check_keys, check_sealed, check_targets
from store_client.tiers.disk.budget import Budget
from store_client.tiers.disk.index import name_prefix
from store_client.tiers.disk.opening import PAGES, open_folder
from store_client.tiers.disk.pagefile import GRANULE, granules_of
from store_client.tiers.disk.pages import Pages
from store_client.tiers.disk.runs import Place, runs_of
from store_client.tiers.faults import as_tier_error, cause_of
from store_client.tiers.workers import Outcome, Workers

AT_ONCE = 16
"""Reads and writes under way at once."""
COMMIT_AFTER_S = 1.0
COMMIT_NBYTES = 64 << 20
_CLOSE_S = 10.0
"""For a commit under way when it is closed."""
_GROWTH = (256 << 20) // GRANULE
_MAX_AHEAD = (256 << 20) // GRANULE
"""Granules that are freed at once where space is short, so that not every batch waits for the index."""
_MIN_CAPACITY = 1 << 20
_MAX_CAPACITY = (1 << 32) * GRANULE

logger = get_logger(__name__)


class Disk(Tier):
    """Raises TierError where the folder cannot be used, or another agent uses it."""

    parallel = 4  # half of it, and of large pages fewer than `AT_ONCE` are under way, of others when a batch ends

    def __init__(self, settings: DiskTier, pool_name: str = "") -> None:
        self._title, self._path = f"tier {settings.title}", settings.path.expanduser()
        self._closed = threading.Event()
        self._failed: TierError | None = None
        if not _MIN_CAPACITY <= settings.capacity <= _MAX_CAPACITY:
            raise TierError(
                f"{self._title}: capacity {human_nbytes(settings.capacity)} is out of range: set it between "
                f"{human_nbytes(_MIN_CAPACITY)} and {human_nbytes(_MAX_CAPACITY)}",
                lasting=True,
            )
        self._limit = settings.capacity // GRANULE
        self._commit_lock = threading.RLock()
        with self._faults("opening it"):
            opened = open_folder(self._title, self._path, self._limit, direct=settings.direct)
        self._file, self._index = opened.file, opened.index
        self._size = self._file.granules
        self._pages = Pages(opened.pages, 1, self._size)
        # What was written in the second before a crash is not in the index: it counts nonetheless.
        self._budget = Budget(settings.daily_writes, opened.meta, 0 if opened.meta.closed else COMMIT_NBYTES)
        self._workers = Workers(f"disk-{settings.title}", AT_ONCE)
        self._due, self._now = threading.Event(), threading.Event()
        self._pending_nbytes = 0
        self._no_room = ""
        """Why it could not grow when it was last to."""
        self._committer = threading.Thread(target=self._keep_committing, name="mooncake-connector-disk", daemon=True)
        self._committer.start()
        self._due.set()  # from now on the index says that this agent has not closed it

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        check_keys(keys)
        self._check_usable()
        prefix = name_prefix(space)
        return self._pages.present([prefix + key for key in keys], nbytes)

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        check_targets(targets, nbytes)
        self._check_usable()
        prefix = name_prefix(space)
        names = [prefix + target.key for target in targets]
        held = self._pages.hold(names, nbytes)
        try:
            found = [(i, page) for i, page in enumerate(held) if page is not None]
            places, pieces = [page.extents for _, page in found], [targets[i].pieces for i, _ in found]
            outcome = self._move(self._file.read, places, pieces, nbytes, deadline_s)
        finally:
            self._pages.let_go(held)
        self._pages.forget(names[i] for (i, _), result in zip(found, outcome, strict=True) if _is_fault(result))
        self._raise_first(outcome, "reading")
        seals: list[bytes | None] = [None] * len(targets)
        for (i, page), result in zip(found, outcome, strict=True):
            if result is None:
                seals[i] = page.seal
        return seals

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        check_sealed(pages, nbytes)
        self._check_usable()
        prefix = name_prefix(space)
        names = [prefix + page.key for page in pages]
        fresh = [i for i, is_new in enumerate(self._pages.absent(names)) if is_new]
        outcome = [Put.PRESENT] * len(pages)
        for i in fresh:
            outcome[i] = Put.FAILED
        size, places = granules_of(nbytes) * GRANULE, []
        fresh = fresh[: self._budget.take(len(fresh), size)]
        try:
            with self._faults("writing"):
                places = self._take(nbytes, len(fresh))
        finally:
            self._budget.give_back((len(fresh) - len(places)) * size)
        fresh = fresh[: len(places)]
        results = self._move(self._file.write, places, [pages[i].pieces for i in fresh], nbytes, deadline_s)
        for i, place, result in zip(fresh, places, results, strict=True):
            if result is None:
                outcome[i] = self._pages.publish(names[i], nbytes, pages[i].seal, place)
            else:
                self._pages.give_back([place])
        self._budget.give_back(sum(isinstance(result, TimeoutError) for result in results) * size)
        self._set_due(len(fresh) * nbytes)
        self._raise_first(results, "writing")
        return outcome

    def _move(
        self, move: Callable[[Place, Pieces], None], places: Sequence[Place], pieces: Sequence[Pieces], nbytes: int,
        deadline_s: float,
    ) -> Outcome[None]:  # fmt: skip
        """Read or write pages, each between its place and its pieces; what became of each."""
        runs = runs_of(places, nbytes, AT_ONCE)
        moves = [partial(move, place, [piece for page in pieces[run] for piece in page]) for run, place in runs]
        outcome = self._workers.run(moves, deadline_s)
        return [result for (run, _), result in zip(runs, outcome, strict=True) for _ in pieces[run]]

    def _take(self, nbytes: int, count: int) -> list[Place]:
        """Places for so many pages: free ones first, then from growth, then from pages that were not used for long."""
        size = granules_of(nbytes)
        places = self._pages.take(nbytes, count)
        if len(places) == count:
            return places
        with self._commit_lock:  # one at a time, so that nobody evicts for space that another has just made
            while taken := self._pages.take(nbytes, count - len(places)):
                places += taken
            try:
                while (missing := (count - len(places)) * size) and self._make_room(missing, not places):
                    places += self._pages.take(nbytes, count - len(places))
            except BaseException:
                self._pages.give_back(places)
                raise
        return places

    def _make_room(self, missing: int, needed: bool) -> bool:
        """Make more space free, so many granules if possible; False where there is no more.

        Raises OSError where that is `needed` and it is others who fill the file system.
        """
        free, full = self._pages.free_granules, None
        if self._size < self._limit:
            before, full = self._size, self._grow(missing)
            if full is None:
                if self._size == self._limit or self._size >= before + _GROWTH:
                    self._no_room = ""
                return True
            self._no_room = str(full.strerror)
            log_once("tier.disk:no room", "%s (%s) %s", self._title, self._path, self._as_far(), logger=logger)
        self._pages.make_room(max(missing, min(self._size // 16, _MAX_AHEAD)))
        self.flush()
        if self._pages.free_granules > free:
            return True
        if full is not None and needed:
            raise full
        return False

    def _as_far(self) -> str:
        """How large it became, and why no larger."""
        size, limit = human_nbytes(self._size * GRANULE), human_nbytes(self._limit * GRANULE)
        return f"uses {size} of its capacity of {limit}: {self._no_room}"

    def _grow(self, missing: int) -> OSError | None:
        """Make the file larger, by so many granules if possible; or why there is no room. Raises other OSErrors."""
        room = min(self._limit - self._size, self._file.room)
        full = OSError(errno.ENOSPC, "No space left on device but what is kept free (5 % of the file system)")
        for more in (max(missing, _GROWTH), missing):
            stop = self._size + min(more, room)
            if stop == self._size:
                break
            try:
                self._file.grow(self._size, stop)
            except OSError as error:
                if cause_of(error) != "full":
                    raise
                full = error
            else:
                self._pages.grown(self._size, stop)
                self._size = stop
                return None
        return full

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        self._check_usable()
        prefix = name_prefix(space)
        removed = self._pages.forget(prefix + key for key in keys)
        self._set_due(0)
        return removed

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        self._check_usable()
        removed = self._pages.forget_namespace(namespace)
        self.flush()
        return removed

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        self._check_usable()
        return self._pages.shards(namespace)

    def stats(self) -> TierStats:
        self._check_usable()
        notes = {"path": str(self._path), "direct I/O": "yes" if self._file.direct else "no"}
        if (left := self._budget.left_nbytes) is not None:
            notes["may be written today"] = human_nbytes(left)
        if self._no_room:
            notes["no room"] = self._as_far()
        return TierStats(
            capacity_nbytes=self._limit * GRANULE, used_nbytes=self._pages.used_granules * GRANULE,
            pages=len(self._pages), evicted_pages=self._pages.evicted, notes=notes,
        )  # fmt: skip

    def tidy(self, deadline_s: float) -> None:
        self._check_usable()
        self.flush()

    def flush(self) -> None:
        """Make what was written, used and removed so far last over a crash and a loss of power."""
        self._commit(closed=False)

    def _commit(self, closed: bool) -> None:
        with self._commit_lock, self._faults("making pages last"):
            if self._failed is not None:
                raise self._failed
            changes, waiting = self._pages.changed()
            self._pending_nbytes = 0
            try:
                if any(changes.values()):
                    self._file.sync()
                self._index.commit(changes, self._budget.meta(self._file.id, closed))
            except (lmdb.DiskError, lmdb.MapFullError):  # nothing was written, and there may be room again
                self._pages.untold(changes, waiting)
                raise
            except (OSError, lmdb.Error) as error:
                # What the kernel could not write it forgets, so nothing of these changes can be relied on any more.
                self._failed = self._as_error("making pages last", error, lasting=True)
                raise self._failed from None
            self._pages.forgotten(waiting)

    def _set_due(self, nbytes: int) -> None:
        self._pending_nbytes += nbytes
        self._due.set()
        if self._pending_nbytes >= COMMIT_NBYTES:
            self._now.set()

    def _keep_committing(self) -> None:
        while not self._closed.is_set():
            self._due.wait()
            self._now.wait(COMMIT_AFTER_S)
            self._due.clear()
            self._now.clear()
            if self._closed.is_set():
                return
            try:
                self.flush()
            except TierError as error:
                log_once(f"tier.disk:{error.cause}", "%s", error, logger=logger)
                if error.lasting:
                    return

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._due.set()
        self._now.set()
        self._workers.close()
        self._committer.join(_CLOSE_S)
        if self._committer.is_alive():  # it uses the files
            said = "%s is left open: making pages last has not come back after %g s"
            log_once("tier.disk:hanging", said, self._title, _CLOSE_S, logger=logger)
            return
        try:
            self._commit(closed=True)
        except TierError as error:
            log_once(f"tier.disk:{error.cause}", "%s", error, logger=logger)
        self._index.close()
        self._file.close()

    def _check_usable(self) -> None:
        if self._closed.is_set():
            raise TierError(f"{self._title} is closed", "unavailable")
        if self._failed is not None:
            raise self._failed
        with self._faults("looking at it"):
            if not self._file.is_in_place():
                raise TierError(
                    f"{self._title}: {self._path / PAGES} was deleted or replaced; start the agent again",
                    "unavailable", lasting=True,
                )  # fmt: skip

    def _raise_first(self, outcome: Outcome[None], doing: str) -> None:
        """A disk that fails for one page is in doubt as a whole; one that is only slow gives what came in time."""
        late = [result for result in outcome if isinstance(result, TimeoutError)]
        if outcome and len(late) == len(outcome):
            raise TierError(f"{self._title}: {doing} took too long", "timeout")
        for result in outcome:
            if _is_fault(result):
                raise self._as_error(doing, result)
            if result is not None and not isinstance(result, OSError):
                raise result

    def _as_error(self, doing: str, error: OSError | lmdb.Error, *, lasting: bool = False) -> TierError:
        if isinstance(error, lmdb.Error):
            cause = "full" if isinstance(error, (lmdb.MapFullError, lmdb.DiskError)) else "error"
            return TierError(f"{self._title}: {doing} failed: {error}", cause, lasting=lasting)
        found = as_tier_error(f"{self._title} ({self._path})", doing, error)
        return TierError(str(found), found.cause, lasting=lasting)

    @contextmanager
    def _faults(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (OSError, lmdb.Error) as error:
            raise self._as_error(doing, error) from None


def _is_fault(result: object) -> TypeGuard[OSError]:
    return isinstance(result, OSError) and not isinstance(result, TimeoutError)
