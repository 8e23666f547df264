"""The pools that this process has open: each once, however many stores are made on it.

Also what happens to them without the caller: a fork, and a pool folder that is deleted or replaced while it is open.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mooncake_connector.errors import PoolError
from mooncake_connector.log import get_logger, kind_of, log_once
from store_client.embedded.arena import GRANULE
from store_client.embedded.faults import CallersOwn, start_thread
from store_client.embedded.locks import LockTimeout
from store_client.embedded.opening import open_pool
from store_client.embedded.pool import REPLACED, Pool
from store_client.memory_locks import MemoryLocks

logger = get_logger(__name__)

_CLOSE_WAIT_S = 2.0
_OLD_CLOSE_TRIES = 300
"""A pool that was replaced keeps its deleted files in memory until the last call in it has come to its end."""
_REOPEN_DEADLINE_S = 10.0

T = TypeVar("T")

_lock = threading.Lock()
_handles: dict[Path, "Handle"] = {}


def attach(path: Path, capacity_nbytes: int | None, eviction: str | None, deadline_s: float, rebuild: bool) -> "Handle":
    """The handle of the pool at `path`, opened if this process has not yet. Raises PoolError."""
    path = Path(os.path.abspath(path))
    with _lock:
        handle = _handles.get(path)
        if handle is None:
            pool = open_pool(path, capacity_nbytes, eviction, deadline_s, rebuild=rebuild)
            handle = _handles[path] = Handle(path, pool, capacity_nbytes, eviction, rebuild)
        else:
            handle.adopt(capacity_nbytes, deadline_s)
        handle.users += 1
        return handle


class Handle:
    """A pool that stays the one of its folder: when that is replaced, a thread opens the new one."""

    def __init__(
        self, path: Path, pool: Pool, capacity_nbytes: int | None, eviction: str | None, rebuild: bool
    ) -> None:
        self.path = path
        self.users = 0
        self._pool: Pool | None = pool
        self._capacity_nbytes = capacity_nbytes
        self._eviction, self._rebuild = eviction, rebuild
        self._following = threading.Lock()
        self._locks: list[MemoryLocks] = []

    def lock_memory(self, closed: threading.Event, locks: MemoryLocks) -> None:
        """Keep the pool's memory page-locked until the pool is closed, and that of one that takes its place."""
        with _lock:
            if any(locks is other for other in self._locks):
                return
            self._locks.append(locks)
            self.call(closed, lambda pool: pool.lock_memory(locks), None)

    def adopt(self, capacity_nbytes: int | None, deadline_s: float) -> None:
        """A further store of this process may ask for another capacity."""
        if capacity_nbytes is not None and capacity_nbytes != self._capacity_nbytes and self._pool is not None:
            try:
                self._pool.resize(capacity_nbytes, deadline_s)
            except PoolError:
                raise
            except Exception as error:
                self._pool.note(error)
                raise PoolError(f"pool {self.path}: its capacity cannot be changed: {error!r}") from error
            self._capacity_nbytes = capacity_nbytes

    def look(self, closed: threading.Event, use: Callable[[Pool], T], otherwise: T) -> T:
        """What `use` makes of the pool's table, which stays mapped as long as anybody refers to it.

        A fault ends here: a counter, one log line, and `otherwise`, which is also the answer where there is no pool.
        """
        pool = self.current(closed)
        if pool is None:
            return otherwise
        try:
            return use(pool)
        except Exception as error:
            self._contain(pool, error)
            return otherwise

    def call(self, closed: threading.Event, use: Callable[[Pool], T], otherwise: T) -> T:
        """As `look`, and the pool stays open during the call."""
        with self.use(closed) as pool:
            if pool is None:
                return otherwise
            try:
                return use(pool)
            except Exception as error:
                self._contain(pool, error)
                return otherwise

    def ask(self, closed: threading.Event, use: Callable[[Pool], T]) -> T:
        """As `call`, for a person who wants to know: raises PoolError where the pool gives no answer."""
        with self.use(closed) as pool:
            if pool is None:
                raise PoolError(self._no_answer("the store is closed"))
            try:
                return use(pool)
            except Exception as error:
                _judge(pool, error)
                if isinstance(error, LockTimeout):
                    reason = "a process that does not run holds its lock; continue or end it"
                    raise PoolError(self._no_answer(reason)) from None
                raise PoolError(self._no_answer(repr(error))) from error

    def _no_answer(self, reason: str) -> str:
        if self._pool is not None and self._pool.damage is not None:
            reason = (
                f"it is damaged ({self._pool.damage}); an engine that uses it makes it anew when it notices, and "
                "`mooncake-connector store destroy` removes it"
            )
        return f"pool {self.path} gives no answer: {reason}"

    def _contain(self, pool: Pool, error: Exception) -> None:
        _judge(pool, error)
        if isinstance(error, LockTimeout):
            pool.counters.add(busy=1)
            log_once(
                "store.busy", "pool %s: the write lock was not free in time; a process that uses the pool may be "
                "stopped", self.path, logger=logger,
            )  # fmt: skip
        else:
            pool.counters.add(error=1)
            log_once("store.error", "pool %s: a call failed: %r", self.path, error, logger=logger, exc_info=True)

    def current(self, closed: threading.Event) -> Pool | None:
        """The pool for a look at its table, which stays mapped as long as anybody refers to it."""
        pool = self._pool
        if pool is None or closed.is_set():
            return None
        if pool.replaced():
            self._follow(pool)
        return pool if pool.damage is None else None

    @contextmanager
    def use(self, closed: threading.Event) -> Iterator[Pool | None]:
        """The pool, which stays open during the block; None once the store is closed, or in a forked child."""
        pool = self.current(closed)
        if pool is None:
            yield None
            return
        with pool.use() as usable:
            yield pool if usable else None

    def _follow(self, old: Pool) -> None:
        """Open what the folder holds now, in a thread: whoever noticed goes on with the old pool meanwhile."""
        if self._following.acquire(blocking=False) and not start_thread("reopen", self._reopen, old):
            self._following.release()

    def _reopen(self, old: Pool) -> None:
        try:
            lost = old.lost()
            log_once(f"store.lost:{kind_of(lost or '')}", "pool %s is opened again: %s", self.path, lost, logger=logger)
            # What another process put in its place is taken as it is.
            broken = lost is not None and lost != REPLACED
            with _lock:  # a store that this process opens meanwhile would find the pool open already
                if not self.users or self._pool is not old:
                    return
                self._pool = open_pool(
                    self.path, self._capacity_nbytes or old.arena.limit * GRANULE, self._eviction, _REOPEN_DEADLINE_S,
                    rebuild=self._rebuild and broken, distrusted=old.data if broken else None,
                )  # fmt: skip
                for locks in self._locks:
                    self._pool.lock_memory(locks)
        except PoolError as error:
            log_once("store.lost", "pool %s cannot be opened again: %s", self.path, error, logger=logger)
            return
        finally:
            self._following.release()
        for _ in range(_OLD_CLOSE_TRIES):
            if old.close(_CLOSE_WAIT_S):
                return

    def detach(self) -> None:
        """One store less; the last one closes the pool, unless other threads are still inside."""
        with _lock:
            self.users -= 1
            if self.users > 0 or self._pool is None:
                return
            if self._pool.close(_CLOSE_WAIT_S):
                self._pool = None
                _handles.pop(self.path, None)

    def abandon_in_child(self) -> None:
        if self._pool is not None:
            _orphans.append(self._pool)
            self._pool.abandon_in_child()
            self._pool = None


def _judge(pool: Pool, error: Exception) -> None:
    """Raise what is not ours to contain, a caller's own exception or a PoolError; note what else proves damage."""
    if isinstance(error, CallersOwn):
        raise error.__cause__ or error from None
    if isinstance(error, PoolError):
        raise error
    pool.note(error)


_orphans: list[Pool] = []
"""Pools of a parent process, kept in its forked child so that nothing of theirs is ever finalised there."""


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for handle in _handles.values():
        handle.abandon_in_child()
    _handles.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
