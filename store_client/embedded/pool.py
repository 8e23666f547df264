"""An opened pool: its mapped parts, and how long they may be used."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from mooncake_connector.errors import PoolError
from store_client.embedded import layout
from store_client.embedded.arena import GRANULE, Arena
from store_client.embedded.counters import Counters
from store_client.embedded.ledger import Ledger
from store_client.embedded.locks import FileLock, LockTimeout, Owners
from store_client.embedded.reader import Reader
from store_client.embedded.spaces import Spaces
from store_client.embedded.table import Found, Table
from store_client.embedded.writer import Writer

_CHECK_PERIOD_S = 1.0
_DROP_DEADLINE_S = 1.0
_DROP_PAUSE_S = 0.002


class Pool:
    """One opening of a pool by this process; `opening.open_pool` makes it."""

    def __init__(
        self, path: Path, identity: tuple[int, int], max_pages: int, table: Table, ledger: Ledger, arena: Arena,
        spaces: Spaces, lock: FileLock, owners: Owners, writer: Writer, counters: Counters,
    ) -> None:  # fmt: skip
        self.path = path
        self.max_pages = max_pages
        self.table = table
        self.spaces = spaces
        self.arena = arena
        self.counters = counters
        self.writer = writer
        self.reader = Reader(table, arena, self.counters, self._condemn)
        self._identity = identity
        self._ledger, self._lock, self._owners = ledger, lock, owners
        self._next_check = 0.0
        self._uses = 0
        self._idle = threading.Condition()
        self._closing = False
        self._dropping = threading.Lock()

    def _condemn(self, found: Found) -> None:
        """Drop a corrupt page soon, in a thread: whoever met it must not wait for the write lock."""
        self.writer.condemn(found)
        if self._dropping.acquire(blocking=False):
            threading.Thread(target=self._drop, name="mooncake-connector-drop", daemon=True).start()

    def _drop(self) -> None:
        try:
            with self.use() as usable:
                while usable and self.writer.has_condemned:  # whoever reads a batch meets one page after the other
                    with self.writer.locked(time.monotonic() + _DROP_DEADLINE_S):
                        pass  # taking the lock forgets them
                    time.sleep(_DROP_PAUSE_S)
        except (LockTimeout, OSError, lmdb.Error):
            pass  # the next put does it
        finally:
            self._dropping.release()

    @contextmanager
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

    def replaced(self) -> bool:
        """True once the folder no longer leads to this pool; looks at most once a second."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_PERIOD_S
        try:
            info = os.stat(self.path / "pool.json")
        except OSError:
            return True
        return (info.st_dev, info.st_ino) != self._identity

    def close(self, wait_s: float) -> bool:
        """Hand in the counts and let go of everything; False (and still open) if calls are inside after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._idle:
            self._closing = True
            if not self._idle.wait_for(lambda: self._uses == 0, wait_s):
                self._closing = False
                return False
        try:
            with self.writer.locked(deadline):
                pass
        except (LockTimeout, OSError, lmdb.Error):
            pass  # the counts since the last put are lost, nothing else
        self.arena.close()  # before others may find themselves alone
        self._owners.leave()
        self._lock.close()
        self._ledger.close()
        return True

    def abandon_in_child(self) -> None:
        """After a fork: close what the parent owns without unlocking it, and never use the rest."""
        self._idle = threading.Condition()
        self._closing = True
        self._owners.abandon()
        self._lock.abandon_in_child()
        self.arena.abandon_in_child()

    def resize(self, capacity_nbytes: int, deadline_s: float) -> None:
        """Change the capacity. Raises PoolError where the file system has no room for it, or the pool stays locked."""
        granted = self.table.capacity_granules * GRANULE
        granules = layout.check_capacity(self.path, capacity_nbytes, layout.held_nbytes(self.path), granted) // GRANULE
        try:
            self.writer.resize(granules, time.monotonic() + deadline_s)
        except LockTimeout:
            raise PoolError(f"pool {self.path} stayed locked for {deadline_s:g} s: its capacity is unchanged") from None
