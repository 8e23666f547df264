"""`EmbeddedSpace`: the pages of one namespace and shard in the embedded pool.

Faults of the pool end here: a miss or a failed put, a counter and one log line.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Consume, Digests, Fill, Lookup, Pieces, Position, Put, Settle, Space
from store_client.embedded.arena import GRANULE, spread
from store_client.embedded.evicted import refusal
from store_client.embedded.faults import CallersOwn, callers
from store_client.embedded.hashing import completed, digest
from store_client.embedded.locks import LockTimeout
from store_client.embedded.names import hash_keys, identify, join_keys
from store_client.embedded.pool import Pool
from store_client.embedded.put import Place, PutPages, PutPlan
from store_client.embedded.reader import ConsumeAll
from store_client.embedded.registry import Handle
from store_client.embedded.table import BROUGHT
from store_client.fate import UNKNOWN, Fate, Known

logger = get_logger(__name__)

_BATCH_NBYTES = 64 << 20
"""At most so much is reserved at a time: what a killed writer can hold back, and what a small pool must free."""
_BATCH_PAGES = 1024
_BEGUN_NBYTES, _BEGUN_SHARE = 1 << 30, 16
"""Of pages that a device writes, so much instead, and of a small pool a 16th: while space is reserved and pages are
committed the device has nothing to do, for two to four milliseconds."""
_REMOVE_DEADLINE_S = 5.0
_UNCOUNTED = ("stored", "present", "unfilled", "cleared")
"""What is no fault of the pool."""

FillAll: TypeAlias = Callable[[Sequence[tuple[int, Pieces]]], Sequence[int | None]]
"""Called with (number in the keys, writable pieces) of every page that has a place; returns for each its XXH3-64, or
None where the page is not to be stored."""
_FillPlan: TypeAlias = Callable[[Pool, PutPlan], None]
T = TypeVar("T")


class Locked(Protocol):
    """Has something done that takes the write lock, by whichever thread, and returns or raises what that does."""

    def __call__(self, do: Callable[[], T], /) -> T: ...


def _at_once(do: Callable[[], T]) -> T:
    return do()


def put_batch(nbytes: int) -> int:
    """How many pages of `nbytes` are put at a time."""
    return max(1, min(_BATCH_PAGES, _BATCH_NBYTES // max(1, nbytes)))


def _begun_batch(pool: Pool, nbytes: int) -> int:
    """As `put_batch`, of pages that a device writes. (What is looked at without the lock may be outdated.)

    Where the arena has yet to grow it is what there is memory for, or as much as there: memory is secured under the
    lock, 64 MiB in some ten milliseconds.
    """
    capacity, secured = pool.arena.limit * GRANULE, pool.arena.secured_nbytes
    most = min(_BEGUN_NBYTES, capacity // _BEGUN_SHARE)
    if secured < capacity:
        most = min(most, secured - pool.table.used_granules * GRANULE)
    return max(put_batch(nbytes), min(_BATCH_PAGES, most // max(1, nbytes)))


def _fill_each(fill: Fill, at: int, pool: Pool, plan: PutPlan) -> None:
    nbytes = plan.pages.nbytes
    for place in plan.places:
        pieces = pieces_of(pool, place, nbytes)
        if pieces is not None:
            whole = _whole(pieces, nbytes)
            fill(at + place.index, whole)
            if len(pieces) > 1:
                spread(whole, pieces)
            place.checksum = digest(whole)


def _begin_each(fill: Fill, settle: Settle, at: int, pool: Pool, plan: PutPlan) -> None:
    nbytes = plan.pages.nbytes
    places: list[Place] = []
    begun: list[tuple[Bytes, list[Bytes]]] = []  # each page in one piece, which may be memory of its own
    digests: Digests | None = None
    try:
        for place in plan.places:
            pieces = pieces_of(pool, place, nbytes)
            if pieces is not None:
                places.append(place)
                begun.append((_whole(pieces, nbytes), pieces))
                fill(at + place.index, begun[-1][0])
    finally:
        if places:
            digests = settle()
    for whole, pieces in begun:
        if len(pieces) > 1:
            spread(whole, pieces)
    for place, checksum in zip(places, completed(digests, [whole for whole, _ in begun]), strict=True):
        place.checksum = checksum


def _whole(pieces: list[Bytes], nbytes: int) -> Bytes:
    return pieces[0] if len(pieces) == 1 else np.empty(nbytes, dtype=np.uint8)


def _fill_all(fill: FillAll, at: int, pool: Pool, plan: PutPlan) -> None:
    prepared = [(place, pieces) for place in plan.places if (pieces := pieces_of(pool, place, plan.pages.nbytes))]
    if not prepared:
        return
    checksums = fill([(at + place.index, pieces) for place, pieces in prepared])
    if len(checksums) != len(prepared) or not all(one is None or 0 <= one < 1 << 64 for one in checksums):
        raise CallersOwn from ValueError(
            f"{len(checksums)} checksums for {len(prepared)} pages, or one of over 64 bits"
        )
    for (place, _), checksum in zip(prepared, checksums, strict=True):
        place.checksum = checksum


def pieces_of(pool: Pool, place: Place, nbytes: int) -> list[Bytes] | None:
    """Where the page goes, with the list of its extents written where it needs one."""
    extents = place.extents
    if place.is_listed:
        listed = pool.arena.views(extents[:1], 8 * (len(extents) - 1))
        if listed is None:
            return None
        listed[0][:] = np.array(extents[1:], dtype="<u4").reshape(-1).view(np.uint8)
        extents = extents[1:]
    return pool.arena.views(extents, nbytes)


class EmbeddedSpace(Space):
    def __init__(self, handle: Handle, closed: threading.Event, namespace: Namespace, shard: Shard) -> None:
        self._handle, self._closed = handle, closed
        self._namespace, self._shard = namespace, shard
        self.is_private = namespace.is_private
        """Whether nobody but the instance that stores its pages can ever read them."""
        self._number = identify((namespace.digest, shard))

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """As `Space.lookup`; all there is to know is known at once."""
        return Lookup(self.leading(keys))

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many leading pages are present."""
        if keys and len(keys[0]) != KEY_NBYTES:
            join_keys(keys[:1])
        return self._handle.look(self._closed, lambda pool: pool.reader.prefix(keys, self._number), 0)

    def leading_since(self, keys: Sequence[bytes], since: Position | None) -> tuple[Position | None, int | None]:
        """Where the feed of the pool's changes ends, and how many leading pages are present; None where the feed still
        ends at `since`, so lookups find what they found. (None, 0) where there is no pool."""
        if keys and len(keys[0]) != KEY_NBYTES:
            join_keys(keys[:1])
        pool = self._handle.current(self._closed)
        if pool is None:
            return None, 0
        try:
            position = pool.feed.position()
            return position, None if position == since else pool.reader.prefix(keys, self._number)
        except Exception as error:
            self._handle.contain(pool, error)
            return None, 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if len(keys) != 1 or len(keys[0]) != KEY_NBYTES:
            join_keys(keys)
        absent = [False] * len(keys)
        return self._handle.look(self._closed, lambda pool: pool.reader.contains(keys, self._number), absent)

    def explain(self, keys: Sequence[bytes]) -> list[Fate]:
        joined = None if len(keys) == 1 and len(keys[0]) == KEY_NBYTES else join_keys(keys)

        def explain(pool: Pool) -> list[Fate]:
            present = pool.reader.contains(keys, self._number)
            # After that: what goes in between is remembered by then.
            if joined is None:
                return [Fate(Known.STORED) if present[0] else pool.evicted.fate(keys[0], self._number)]
            fates = pool.evicted.fates(joined, self._number)
            return [Fate(Known.STORED) if there else fate for there, fate in zip(present, fates, strict=True)]

        return self._handle.look(self._closed, explain, [UNKNOWN] * len(keys))

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of each page; 0 where it is not present. Takes no lock and writes nothing."""
        join_keys(keys)
        return self._handle.look(self._closed, lambda pool: pool.reader.sizes(keys, self._number), [0] * len(keys))

    def read(self, keys: Sequence[bytes], consume: Consume, *, nbytes: int, settle: Settle | None = None) -> list[bool]:
        join_keys(keys)
        show, end = callers(consume), None if settle is None else callers(settle)
        return self._handle.call(
            self._closed, lambda pool: pool.reader.read(keys, self._number, show, nbytes, end), [False] * len(keys)
        )

    def write(
        self,
        keys: Sequence[bytes],
        fill: Fill,
        *,
        nbytes: int,
        parents: Sequence[bytes | None],
        deadline_s: float,
        settle: Settle | None = None,
    ) -> list[Put]:
        pages = PutPages(self._namespace, self._shard, keys, parents, nbytes)
        if settle is None:
            return self._put(pages, partial(_fill_each, callers(fill)), deadline_s)
        return self._put(pages, partial(_begin_each, callers(fill), callers(settle)), deadline_s, batch_of=_begun_batch)

    def receive(
        self,
        keys: Sequence[bytes],
        fill: FillAll,
        *,
        nbytes: int,
        parents: Sequence[bytes | None],
        deadline_s: float,
        follows: Collection[bytes] = (),
        clears: int | None = None,
        locked: Locked = _at_once,
    ) -> list[Put]:
        """As `write`, for pages that somebody else brings: `fill` is given all places at once, and returns checksums.

        `fill(places)` gets a pair of number in `keys` and writable pieces of the arena for each absent page that has a
        place, at most 64 MiB of them at a time, and fills the pieces. It returns for each the XXH3-64 of what is in
        them, which nobody computes again, or None where the page did not come: that one is FAILED. Until it returns
        nobody else is given these places, however long it takes. An exception of `fill` passes through, and none of
        those pages is stored.

        `follows`: keys that others are storing right now, so that pages behind them are no orphans, which get only what
        space is free. `clears`: `EmbeddedStore.clears` from before; where pages were cleared since, nothing is stored.
        """
        pages = PutPages(
            self._namespace, self._shard, keys, parents, nbytes, follows=follows, clears=clears, mark=BROUGHT
        )
        return self._put(pages, partial(_fill_all, callers(fill)), deadline_s, locked=locked)

    def show(self, keys: Sequence[bytes], consume: ConsumeAll, *, nbytes: int) -> list[bool]:
        """Show all pages that are present to one call of `consume`, as they lie in the arena, without a copy.

        `consume(pages)` gets the number in `keys`, the read-only pieces and the XXH3-64 of each. It is not called where
        none is present. The bytes were not held against the checksum, and may be overwritten during the call: True at i
        says that page i stayed in place until its end. Nobody counts this as a use of the page. An exception of
        `consume` passes through.
        """
        join_keys(keys)
        absent = [False] * len(keys)
        show = callers(consume)
        return self._handle.call(self._closed, lambda pool: pool.reader.show(keys, self._number, show, nbytes), absent)

    def brought(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether the page is present and came through `receive`: a hint, false at times."""
        join_keys(keys)
        absent = [False] * len(keys)
        return self._handle.look(self._closed, lambda pool: pool.reader.brought(keys, self._number), absent)

    def _put(
        self,
        pages: PutPages,
        fill: Callable[[int, Pool, PutPlan], None],
        deadline_s: float,
        *,
        locked: Locked = _at_once,
        batch_of: Callable[[Pool, int], int] = lambda pool, nbytes: put_batch(nbytes),
    ) -> list[Put]:
        """`batch_of`: how many pages of so many bytes are put at a time."""
        keys, parents, nbytes = pages.keys, pages.parents, pages.nbytes
        if len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        if keys and not 1 <= nbytes < 1 << 32:
            raise ValueError(f"a page of {nbytes} bytes: expected 1 to {(1 << 32) - 1}")
        join_keys(keys)
        join_keys([parent for parent in parents if parent is not None])
        deadline = time.monotonic() + deadline_s
        outcome: list[Put] = []

        def write_all(pool: Pool) -> None:
            nonlocal deadline
            if pool.damage is not None:
                return
            while (at := len(outcome)) < len(keys):
                batch = slice(at, at + batch_of(pool, nbytes))
                some = replace(pages, keys=keys[batch], parents=parents[batch])
                puts, filling_s = self._write_batch(pool, some, partial(fill, at), deadline, locked)
                outcome.extend(puts)
                # Whoever gets the lock each time waits for others and not for one that is stopped.
                deadline = deadline + filling_s if Put.FAILED in puts else time.monotonic() + deadline_s

        self._handle.call(self._closed, write_all, None)
        return outcome + [Put.FAILED] * (len(keys) - len(outcome))

    def _write_batch(
        self, pool: Pool, pages: PutPages, fill: _FillPlan, deadline: float, locked: Locked
    ) -> tuple[list[Put], float]:
        """Reserve, write, commit; a fault of the pool fails what is not stored by then. Also the seconds of `fill`."""
        outcome: dict[int, str] = {}
        filling_s = 0.0
        cause = "error"
        try:
            plan = locked(lambda: pool.writer.reserve(pages, deadline))
            outcome.update(plan.outcome)
            started_s = time.monotonic()
            self._fill_places(pool, plan, fill)
            filling_s = time.monotonic() - started_s
            outcome.update(locked(lambda: pool.writer.commit(plan, deadline + filling_s)))
        except LockTimeout:
            cause = "busy"
            log_once(
                "store.busy", "pool %s: the write lock was not free in time, pages are not saved; a process that uses "
                "the pool may be stopped", pool.path, logger=logger,
            )  # fmt: skip
        except CallersOwn:
            raise
        except Exception as error:
            pool.note(error)
            log_once("store.error", "pool %s: pages are not saved: %r", pool.path, error, logger=logger)
        first: dict[bytes, int] = {}
        results: list[str] = []
        for i, key in enumerate(pages.keys):
            if first.setdefault(key, i) != i:  # twice in one put
                results.append("present" if results[first[key]] == "stored" else results[first[key]])
            else:
                results.append(outcome.get(i, cause))
        self._count(pool, results, pages.nbytes)
        self._remember_refused(pool, pages, results)
        puts = [Put(result) if result in ("stored", "present") else Put.FAILED for result in results]
        return puts, filling_s

    def _remember_refused(self, pool: Pool, pages: PutPages, results: list[str]) -> None:
        for cause in set(results).difference(_UNCOUNTED):
            refused = [key for key, result in zip(pages.keys, results, strict=True) if result == cause]
            pool.evicted.note(hash_keys(join_keys(refused), self._number), refusal(cause))

    @staticmethod
    def _fill_places(pool: Pool, plan: PutPlan, fill: _FillPlan) -> None:
        try:
            fill(pool, plan)
        except BaseException:
            if plan.reservation is not None:
                pool.writer.abandon(plan.reservation)
            raise

    @staticmethod
    def _count(pool: Pool, results: list[str], nbytes: int) -> None:
        stored = results.count("stored")
        pool.counters.add(
            stored_pages=stored, stored_nbytes=stored * nbytes, present_pages=results.count("present"),
            **{cause: results.count(cause) for cause in set(results).difference(_UNCOUNTED)},
        )  # fmt: skip

    def remove(self, keys: Sequence[bytes]) -> int:
        join_keys(keys)
        return self._forget(lambda pool, number, deadline: pool.writer.forget_keys(keys, number, deadline))

    def clear(self) -> int:
        return self._forget(lambda pool, number, deadline: pool.writer.clear({number}, deadline))

    def _forget(self, forget: Callable[[Pool, int, float], int]) -> int:
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        return self._handle.call(self._closed, lambda pool: forget(pool, self._number, deadline), 0)

    def record_lookup(self, *, hit_pages: int, missed_pages: int, page_tokens: int) -> None:
        counts = {
            "hit_pages": hit_pages, "missed_pages": missed_pages, "hit_tokens": hit_pages * page_tokens,
            "missed_tokens": missed_pages * page_tokens,
        }  # fmt: skip
        self._handle.look(self._closed, lambda pool: pool.counters.add(**counts), None)
