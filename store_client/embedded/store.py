"""`EmbeddedStore`: the pool of this machine, opened by this process."""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np

from mooncake_connector.errors import PoolError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Change, Changes, Position, Progress, SpaceInfo, Store, StoreStats, VerifyReport
from store_client.embedded import folder, present
from store_client.embedded.arena import GRANULE
from store_client.embedded.faults import callers
from store_client.embedded.glance import figures
from store_client.embedded.locks import LockTimeout
from store_client.embedded.names import identify
from store_client.embedded.policies import POLICIES
from store_client.embedded.pool import Pool
from store_client.embedded.put import PutPages
from store_client.embedded.putting import FillAll
from store_client.embedded.registry import Handle, attach
from store_client.embedded.returning import put_back
from store_client.embedded.space import EmbeddedSpace
from store_client.embedded.survey import Pages, Survey, View, peek, survey
from store_client.embedded.table import now_ns
from store_client.embedded.watching import UsedChain, Watch
from store_client.memory_locks import MemoryLocks

logger = get_logger(__name__)

_SETTLE_S = 5.0


class EmbeddedStore(Store):
    """Opens the pool in folder `path`, creating it if need be.

    `path` None is a folder of this user under /dev/shm, or under the temporary folder where shared memory is too
    small (logged). `capacity_nbytes` None keeps the capacity that the pool has; a new pool gets a quarter of what is
    free on the file system, at most 16 GiB. `eviction` is one of `POLICIES`, or None for the default; a pool that is
    there keeps its own (logged). `deadline_s` bounds opening.
    A pool that cannot be used (older format, restart of the machine, damage) is rebuilt, or is an error without
    `rebuild`: for whoever only wants to look.

    Raises PoolError where the folder cannot be used; the message says why and what to do. After a fork the child's
    store is closed: it opens one of its own.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        capacity_nbytes: int | None = None,
        *,
        eviction: str | None = None,
        deadline_s: float = 10.0,
        rebuild: bool = True,
    ) -> None:
        if eviction is not None and eviction not in POLICIES:
            raise PoolError(f"eviction {eviction!r} is unknown: expected one of {', '.join(POLICIES)}")
        if path is None:
            path, notice = folder.choose_default(capacity_nbytes)
            if notice:
                log_once("store.fallback", "%s", notice, logger=logger)
        self._handle: Handle = attach(Path(path), capacity_nbytes, eviction, deadline_s, rebuild)
        self._closed = threading.Event()
        self._closing = threading.Lock()
        """Taken by the one call of `close` that counts, and never given back."""

    @property
    def path(self) -> Path:
        """The pool folder."""
        return self._handle.path

    def space(self, namespace: Namespace, shard: Shard, nbytes: int | None = None) -> EmbeddedSpace:
        return EmbeddedSpace(self._handle, self._closed, namespace, shard)

    def shards(self, namespace: Namespace) -> list[Shard]:
        def stored(pool: Pool) -> list[Shard]:
            return [shard for other, shard in pool.spaces.all().values() if other.digest == namespace.digest]

        return self._handle.call(self._closed, stored, [])

    def spaces(self) -> list[tuple[Namespace, Shard]]:
        """Every namespace and shard that was ever written; unlike `namespaces`, this looks at no page."""
        return self._handle.call(self._closed, lambda pool: list(pool.spaces.all().values()), [])

    @property
    def memory(self) -> Bytes | None:
        """The mapped arena, in which the pieces of `EmbeddedSpace.receive` and `show` lie; None for a closed store."""
        return self._handle.look(self._closed, lambda pool: pool.arena.memory, None)

    def space_named(self, digest: bytes, shard: Shard) -> EmbeddedSpace | None:
        """As `space`, for a namespace of which pages were stored here before."""
        known = self._handle.look(self._closed, lambda pool: pool.spaces.all().get(identify((digest, shard))), None)
        return None if known is None else self.space(*known)

    def pages_at(self, start: int, count: int = 4096) -> tuple[tuple[Change, ...], int | None]:
        """The pages in so many places of the pool from place `start` on, parents first, and where to go on, or None at
        the end. Takes no lock; from place 0 on it meets every page that stays meanwhile."""
        none: tuple[tuple[Change, ...], int | None] = (), None
        return self._handle.look(self._closed, lambda pool: present.pages_at(pool, start, count), none)

    def reread(self, seen: present.Reread) -> tuple[Change, ...]:
        """Pages that somebody read since they were stored, parents first; each once for each `seen`. Takes no lock."""
        return self._handle.look(self._closed, seen.take, ())

    def used_chains(self, watch: Watch) -> list[UsedChain]:
        """The chains of pages used since `watch` was given last, see there. Takes no lock."""
        return self._handle.look(self._closed, watch.take, [])

    @property
    def clears(self) -> int:
        """How many times pages of a namespace, or all, were cleared in this pool."""
        return self._handle.look(self._closed, lambda pool: pool.table.clears, -1)

    def changes(self, since: Position | None = None, limit: int = 4096) -> Changes:
        gap = Changes((), since or (0, 0), gap=True)  # nobody's position: a closed or lost pool tells nothing
        return self._handle.look(self._closed, lambda pool: self._changes(pool, since, limit), gap)

    @staticmethod
    def _changes(pool: Pool, since: Position | None, limit: int) -> Changes:
        entries, position = pool.feed.read(since, limit)
        if entries is None:
            return Changes((), position, gap=True)
        if not len(entries):
            return Changes((), position, gap=False)
        alike = (entries["space"][1:] == entries["space"][:-1]) & (entries["stored"][1:] == entries["stored"][:-1])
        alike &= entries["nbytes"][1:] == entries["nbytes"][:-1]
        names = pool.spaces.all()
        changes = []
        for group in np.split(entries, np.flatnonzero(~alike) + 1):
            name = names.get(int(group["space"][0]))
            if name is None:  # the list of namespaces was damaged
                return Changes((), position, gap=True)
            keys = tuple(map(bytes, group["key"]))
            changes.append(Change(bool(group["stored"][0]), name[0].digest, name[1], int(group["nbytes"][0]), keys))
        return Changes(tuple(changes), position, gap=False)

    def namespaces(self) -> list[SpaceInfo]:
        return self._handle.ask(self._closed, self._namespaces)

    @staticmethod
    def _namespaces(pool: Pool) -> list[SpaceInfo]:
        table = pool.table
        live = table.live_slots()
        granules, created = table.granules[live], table.created(live)
        there = (granules > 0) & (created > 0)  # not gone since
        live, granules, created = live[there], granules[there], created[there]
        space, access = table.space[live], table.access[live]
        now, now_used_ns = time.time(), now_ns()
        infos = []
        for number, (namespace, shard) in sorted(pool.spaces.all().items()):
            mine = np.flatnonzero(space == number)
            oldest = now - float(created[mine].min()) if len(mine) else 0.0
            idle = (now_used_ns - int(access[mine].max())) / 1e9 if len(mine) else 0.0
            nbytes = int(granules[mine].sum(dtype=np.int64)) * GRANULE
            infos.append(SpaceInfo(namespace, shard, len(mine), nbytes, max(0.0, oldest), max(0.0, idle)))
        return infos

    def stats(self) -> StoreStats:
        return self._handle.ask(self._closed, self._stats)

    def _stats(self, pool: Pool) -> StoreStats:
        return figures(str(self.path), pool.table.max_pages, pool.table.header, pool.waiting_counts)

    def lock_memory(self, locks: MemoryLocks) -> None:
        self._handle.lock_memory(self._closed, locks)

    def note_request(self, name: str, told: bytes) -> None:
        self._handle.look(self._closed, lambda pool: pool.requests.note(name, told), False)

    def noted_requests(self) -> list[bytes]:
        """What was told of each request that is still kept, in no order. Raises PoolError as `stats` does."""
        return self._handle.ask(self._closed, lambda pool: pool.requests.all())

    def clear(self, namespace_digest: bytes | None = None, *, deadline_s: float = 60.0) -> int:
        """As `Store.clear`. Raises PoolError if the pool stays locked for `deadline_s`."""

        def clear(pool: Pool) -> int:
            spaces = None
            if namespace_digest is not None:
                known = pool.spaces.all().items()
                spaces = {number for number, (namespace, _) in known if namespace.digest == namespace_digest}
            try:
                return pool.writer.clear(spaces, deadline_s)
            except LockTimeout:
                raise PoolError(
                    f"pool {self.path} stayed locked for {deadline_s:g} s by a process that does not run; continue or "
                    "end it, and try again"
                ) from None

        return self._handle.ask(self._closed, clear)

    @property
    def eviction(self) -> str:
        """Name of the pool's eviction policy."""
        return self._handle.ask(self._closed, lambda pool: pool.writer.eviction)

    def choose_eviction(self, name: str, *, deadline_s: float = 10.0) -> None:
        """Name the pool's eviction policy, one of `POLICIES`, for all its processes. Raises PoolError."""
        if name not in POLICIES:
            raise PoolError(f"eviction {name!r} is unknown: expected one of {', '.join(POLICIES)}")
        deadline = time.monotonic() + deadline_s
        self._handle.ask(self._closed, lambda pool: pool.writer.choose_eviction(name, deadline))

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        report = callers(progress) if progress is not None else None

        def verify(pool: Pool) -> VerifyReport:
            slots = pool.table.live_slots().tolist()
            pages = nbytes = corrupt = 0
            unread = []
            for done, slot in enumerate(slots, 1):
                found = pool.table.any_at(slot)
                right = pool.reader.check(found) if found is not None else None
                if found is not None and right is not None:
                    pages += 1
                    nbytes += found.row.nbytes
                    corrupt += not right
                if found is None:
                    unread.append(slot)
                if report is not None:
                    report(done, len(slots))
            with contextlib.suppress(LockTimeout), pool.writer.locked(time.monotonic() + _SETTLE_S):
                pool.table.check(unread)  # and taking the lock forgets what was found corrupt
            return VerifyReport(pages, nbytes, corrupt)

        return self._handle.ask(self._closed, verify)

    def survey(self, namespace_digest: bytes | None = None) -> Survey:
        """What the pool, or one namespace of it, holds now. Raises PoolError where the pool gives no answer."""
        return self._handle.ask(self._closed, lambda pool: survey(pool, namespace_digest))

    def peek(self, pages: Pages, view: View) -> list[bool | None]:
        """Look at pages of a survey without using them; see `survey.peek`. An exception of `view` passes through."""
        show = callers(view)
        return self._handle.ask(self._closed, lambda pool: peek(pool, pages, show))

    def put_back(self, pages: PutPages, fill: FillAll, *, deadline_s: float) -> list[str]:
        """Pages of a copy; see `returning.put_back`. An exception of `fill` passes through.

        Raises PoolError where the pool gives no answer, or stays locked for `deadline_s`.
        """
        deadline = time.monotonic() + deadline_s
        return self._handle.ask(self._closed, lambda pool: put_back(pool, pages, callers(fill), deadline))

    def close(self) -> None:
        if self._closing.acquire(blocking=False):
            self._closed.set()
            self._handle.detach()
