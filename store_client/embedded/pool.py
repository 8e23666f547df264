"""An opened pool: its mapped parts, and how long they may be used."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mooncake_connector.errors import PoolError
from store_client.embedded import contents, layout
from store_client.embedded.arena import GRANULE
from store_client.embedded.counters import as_counts
from store_client.embedded.faults import DAMAGE, start_thread
from store_client.embedded.locks import LockTimeout
from store_client.embedded.parts import Parts
from store_client.embedded.presence import Presence
from store_client.embedded.reader import Reader
from store_client.embedded.table import Found
from store_client.embedded.writer import Writer

_DROP_DEADLINE_S = 1.0
_DROP_PAUSE_S = 0.002


class Pool:
    """One opening of a pool by this process; `opening.open_pool` makes it."""

    def __init__(self, path: Path, parts: Parts, writer: Writer) -> None:
        self.path = path
        self.table, self.feed, self.arena, self.spaces = parts.table, parts.feed, parts.arena, parts.spaces
        self.counters = parts.counters
        self.writer = writer
        self.reader = Reader(parts.table, parts.arena, parts.counters, self._condemn, self._suspect)
        self.data = parts.data
        self.damage: str | None = None
        """What proves that the files cannot be trusted any more."""
        self._presence = Presence(path / contents.DESCRIPTION, parts.data)
        self._parts = parts
        self._uses = 0
        self._idle = threading.Condition()
        self._closing = False
        self._dropping = threading.Lock()

    def _condemn(self, found: Found) -> None:
        """Drop a corrupt page soon, in a thread: whoever met it must not wait for the write lock."""
        self.writer.condemn(found)
        self._drop_soon()

    def _suspect(self, slot: int) -> None:
        self.writer.suspect(slot)
        self._drop_soon()

    def _drop_soon(self) -> None:
        if self._dropping.acquire(blocking=False) and not start_thread("drop", self._drop):
            self._dropping.release()

    def _drop(self) -> None:
        try:
            with self.use() as usable:
                while usable and self.writer.has_condemned:  # whoever reads a batch meets one page after the other
                    self.writer.settle(time.monotonic() + _DROP_DEADLINE_S)
                    time.sleep(_DROP_PAUSE_S)
        except Exception as error:
            self.note(error)  # else the next put does it
        finally:
            self._dropping.release()

    def note(self, error: Exception) -> None:
        """Judge what a call met."""
        if isinstance(error, DAMAGE) and self.damage is None:
            self.damage = f"{type(error).__name__}: {error}"

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
        """True once the folder no longer leads to this pool, or it is damaged; looks at most once a second."""
        if not self._presence.is_due():
            return False
        if self.lost() is not None:
            return True
        with suppress(OSError, PoolError):  # full
            if self._parts.owners.restore():
                self.counters.move(self._parts.owners.page)
        return False

    def waiting_counts(self) -> dict[str, int]:
        """What this and other processes have counted and not handed over yet."""
        return as_counts(self._parts.owners.counts())

    def lost(self) -> str | None:
        """Why it has to be opened again."""
        return self.damage or self._presence.lost()

    def close(self, wait_s: float) -> bool:
        """Hand in the counts and let go of everything; False (and still open) if calls are inside after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._idle:
            self._closing = True
            if not self._idle.wait_for(lambda: self._uses == 0, wait_s):
                self._closing = False
                return False
        settled = False
        with suppress(Exception):
            self.writer.settle(deadline)
            settled = True
        self._parts.close(settled=settled)
        return True

    def abandon_in_child(self) -> None:
        """After a fork: close what the parent owns without unlocking it, and never use the rest."""
        self._idle = threading.Condition()
        self._closing = True
        self._parts.abandon_in_child()

    def resize(self, capacity_nbytes: int, deadline_s: float) -> None:
        """Change the capacity. Raises PoolError where the file system has no room for it, or the pool stays locked."""
        granted = self.table.capacity_granules * GRANULE
        granules = layout.check_capacity(self.path, capacity_nbytes, layout.held_nbytes(self.path), granted) // GRANULE
        try:
            self.writer.resize(granules, time.monotonic() + deadline_s)
        except LockTimeout:
            raise PoolError(f"pool {self.path} stayed locked for {deadline_s:g} s: its capacity is unchanged") from None
