"""An opened pool: its files, mapped and opened by this process, how long they may be used, and whether they still are
those in its folder.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from mooncake_connector.errors import PoolError
from mooncake_connector.log import get_logger, log_once
from mooncake_connector.sizes import human_nbytes
from store_client.embedded import folder
from store_client.embedded.arena import GRANULE, Arena
from store_client.embedded.evicted import Evicted
from store_client.embedded.faults import DAMAGE, start_thread
from store_client.embedded.feed import Feed
from store_client.embedded.ledger import Ledger
from store_client.embedded.locks import FileLock, LockTimeout
from store_client.embedded.names import Spaces
from store_client.embedded.owners import Owners
from store_client.embedded.policies import Hints
from store_client.embedded.policies.file import open_hints
from store_client.embedded.reader import Reader
from store_client.embedded.requests import Requests
from store_client.embedded.table import Found, Table
from store_client.embedded.writer import Writer
from store_client.memory_locks import MemoryLocks

logger = get_logger(__name__)

REPLACED = f"{folder.DESCRIPTION} was replaced"
"""Another process has put another pool in the place of this one."""
_FILES = ("table", "feed", "arena", "spaces", "ledger/data.mdb")
_LOOK_PERIOD_S = 1.0
_DROP_DEADLINE_S = 1.0
_DROP_PAUSE_S = 0.002
_SECURED_DEADLINE_S = 1.0


class Pool:
    """One opening of a pool by this process; `opening.open_pool` makes it, under the pool's open lock.

    Tidies up: takes over what the dead left, and makes `capacity_nbytes` the limit. Raises Unusable if space does not
    add up, PoolError, LockTimeout, OSError, lmdb.Error, or what `faults.DAMAGE` names.
    """

    def __init__(
        self, path: Path, description: folder.Description, capacity_nbytes: int | None, eviction: str | None,
        deadline: float,
    ) -> None:  # fmt: skip
        self.path, self.data = path, description.data(path)
        self.damage: str | None = None
        """What proves that the files cannot be trusted any more."""
        self._uses = 0
        self._idle = threading.Condition()
        self._closing = False
        self._dropping = threading.Lock()
        self._next_look = 0.0
        self._open(description)
        try:
            parts = self._lock, self._ledger, self.table, self.arena, self.spaces, self._owners
            self.writer = Writer(*parts, self._hints, self.evicted)
            secured = self._tidy_up(capacity_nbytes, deadline)
            self._agree_on(eviction)
            self._files = [path / folder.DESCRIPTION, *(self.data / name for name in _FILES)]
            self._known = [os.stat(file) for file in self._files]
        except BaseException:
            self._let_go(settled=True)
            raise
        self.reader = Reader(self.table, self.arena, self.counters, _weakly(self._doubt))
        self.arena.warm_up(secured)

    def _open(self, description: folder.Description) -> None:
        data = self.data
        with contextlib.ExitStack() as opened:
            self.table, self.feed = Table(data / "table", description.max_pages), Feed(data / "feed", description.ring)
            self._ledger = Ledger(data / "ledger", self.table, self.feed)
            opened.callback(self._ledger.close)
            self._lock = FileLock(data / "table")
            opened.callback(self._lock.close)
            self.arena = Arena(data / "arena")
            opened.callback(self.arena.close)
            self._owners = Owners(data / "owners")
            opened.pop_all()
        self.spaces, self.counters = Spaces(data / "spaces"), self._owners.counters
        self.evicted, self.requests = Evicted(data / "evicted", description.max_pages), Requests(data / "requests")
        self._hints: Hints | None = open_hints(data / "policy", description.max_pages)

    def _tidy_up(self, capacity_nbytes: int | None, deadline: float) -> int:
        """Returns the granules that are secured."""
        self.writer.bury(deadline)
        self.writer.begin_counting_uses(deadline)
        problem = self.writer.unsound(deadline)
        if problem is not None:
            raise folder.Unusable(problem)
        stored = self.table.capacity_granules
        if capacity_nbytes is not None and capacity_nbytes // GRANULE != stored:
            self._check_capacity(capacity_nbytes)
            logger.info(
                "pool %s: capacity %s, was %s", self.path, human_nbytes(capacity_nbytes), human_nbytes(stored * GRANULE)
            )
            self.writer.resize(capacity_nbytes // GRANULE, deadline)
        return self.writer.trim(deadline)

    def _agree_on(self, eviction: str | None) -> None:
        """All processes of a pool use its policy: what is asked for counts when a pool is made."""
        has = self.writer.eviction
        if eviction not in (None, has):
            log_once(
                f"store.eviction:{self.path}", "pool %s evicts by %s, as all its processes do, and not by %s as was "
                "asked for here: `mooncake-connector store eviction %s` changes it for all",
                self.path, has, eviction, eviction, logger=logger,
            )  # fmt: skip

    def _check_capacity(self, capacity_nbytes: int) -> None:
        granted = self.table.capacity_granules * GRANULE
        folder.check_capacity(self.path, capacity_nbytes, folder.held_nbytes(self.path), granted)

    def resize(self, capacity_nbytes: int, deadline_s: float) -> None:
        """Change the capacity. Raises PoolError where the file system has no room for it, or the pool stays locked."""
        self._check_capacity(capacity_nbytes)
        try:
            self.writer.resize(capacity_nbytes // GRANULE, time.monotonic() + deadline_s)
        except LockTimeout:
            raise PoolError(f"pool {self.path} stayed locked for {deadline_s:g} s: its capacity is unchanged") from None

    def lock_memory(self, locks: MemoryLocks) -> None:
        """Keep the arena page-locked, in the background, until the pool is closed."""
        if self.arena.is_in_memory:
            self.counters.has_device()  # before it can write
            self.arena.lock_memory(locks, self._secured)
        else:
            log_once(
                f"store.lock_memory:{self.path}", "pool %s is not in shared memory: devices copy its pages by way of "
                "other memory, which takes longer; set `pool` to a folder under /dev/shm", self.path, logger=logger,
            )  # fmt: skip

    def _secured(self) -> int | None:
        """Granules of the arena that the file holds; None where the pool is closed or stays locked."""
        with contextlib.suppress(LockTimeout), self.use() as usable:
            return self.writer.secured(time.monotonic() + _SECURED_DEADLINE_S) if usable else None
        return None

    # -- faults -------------------------------------------------------------------------------------------------

    def note(self, error: Exception) -> None:
        """Judge what a call met."""
        if isinstance(error, DAMAGE) and self.damage is None:
            self.damage = f"{type(error).__name__}: {error}"

    def _doubt(self, slot: int, found: Found | None) -> None:
        """Have a page looked at soon, in a thread: whoever met it must not wait for the write lock."""
        self.writer.doubt(slot, found)
        if self._dropping.acquire(blocking=False) and not start_thread("drop", self._drop):
            self._dropping.release()

    def _drop(self) -> None:
        try:
            with self.use() as usable:
                while usable and self.writer.has_doubts:  # whoever reads a batch meets one page after the other
                    self.writer.settle(time.monotonic() + _DROP_DEADLINE_S)
                    time.sleep(_DROP_PAUSE_S)
        except Exception as error:
            self.note(error)  # else the next put does it
        finally:
            self._dropping.release()

    def replaced(self) -> bool:
        """True once the folder no longer leads to this pool, or it is damaged; looks at most once a second."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_PERIOD_S
        if self.lost() is not None:
            return True
        with contextlib.suppress(OSError, PoolError):  # full
            self._owners.restore()
        return False

    def lost(self) -> str | None:
        """Why it has to be opened again: whoever tidies up /tmp does not ask."""
        if self.damage is not None:
            return self.damage
        for file, known in zip(self._files, self._known, strict=True):
            try:
                there = os.stat(file)
            except OSError:
                return f"{file.name} was deleted"
            if not os.path.samestat(there, known):
                return f"{file.name} was replaced"
            if there.st_size < known.st_size:
                return f"{file.name} was cut off"
        return None

    def waiting_counts(self) -> dict[str, int]:
        """What this and other processes have counted and not handed over yet."""
        return self._owners.counts()

    # -- use and end --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self) -> Iterator[bool]:
        """Keep the pool open during the block; yields False if it is closed already."""
        with self._idle:
            usable = not self._closing
            self._uses += usable
        try:
            yield usable
        finally:
            if usable:
                with self._idle:
                    self._uses -= 1
                    self._idle.notify_all()

    def close(self, wait_s: float) -> bool:
        """Hand in the counts and let go of everything; False (and still open) if calls are inside after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._idle:
            self._closing = True
            if not self._idle.wait_for(lambda: self._uses == 0, wait_s):
                self._closing = False
                return False
        settled = False
        with contextlib.suppress(Exception):
            self.writer.settle(deadline)
            settled = True
        self._let_go(settled=settled)
        return True

    def _let_go(self, *, settled: bool) -> None:
        """`settled`: nothing of this process is left in the pool; else who finds its owner file takes it over."""
        self.arena.close()  # before others may find themselves alone
        if settled:
            self._owners.leave()
        else:
            self._owners.abandon()
        self._lock.close()
        self._ledger.close()

    def abandon_in_child(self) -> None:
        """After a fork: close what the parent owns without unlocking it, and never use the rest."""
        self._idle = threading.Condition()
        self._closing = True
        self._owners.abandon_in_child()
        self._lock.abandon_in_child()
        self.arena.abandon_in_child()


def _weakly(method: Callable[[int, Found | None], None]) -> Callable[[int, Found | None], None]:
    """A method of an object that this does not keep: a pool that was replaced must go, with gigabytes of deleted files
    that it has mapped, even where engines have frozen the collector of cycles."""
    bound = weakref.WeakMethod(method)

    def call(slot: int, found: Found | None) -> None:
        alive = bound()
        if alive is not None:
            alive(slot, found)

    return call
