"""`EmbeddedSpace`: the pages of one namespace and shard in the embedded pool.

Faults of the pool end here: a miss or a failed put, a counter and one log line.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import xxhash

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.base import Bytes, Consume, Fill, Lookup, Put, Space
from store_client.embedded.arena import spread
from store_client.embedded.faults import CallersOwn, callers
from store_client.embedded.locks import LockTimeout
from store_client.embedded.names import identify, join_keys
from store_client.embedded.pool import Pool
from store_client.embedded.registry import Handle
from store_client.embedded.writer import PutPages, PutPlan

logger = get_logger(__name__)

_BATCH_NBYTES = 64 << 20
"""At most so much is reserved at a time: what a killed writer can hold back, and what a small pool must free."""
_BATCH_PAGES = 1024
_REMOVE_DEADLINE_S = 5.0


def _shifted(fill: Fill, at: int, i: int, view: Bytes) -> None:
    fill(at + i, view)


class EmbeddedSpace(Space):
    def __init__(self, handle: Handle, closed: threading.Event, namespace: Namespace, shard: Shard) -> None:
        self._handle, self._closed = handle, closed
        self._namespace, self._shard = namespace, shard
        self._number = identify((namespace.digest, shard))

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """As `Space.lookup`; all there is to know is known at once."""
        if keys and len(keys[0]) != KEY_NBYTES:
            join_keys(keys[:1])
        return Lookup(self._handle.look(self._closed, lambda pool: pool.reader.prefix(keys, self._number), 0))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if len(keys) != 1 or len(keys[0]) != KEY_NBYTES:
            join_keys(keys)
        absent = [False] * len(keys)
        return self._handle.look(self._closed, lambda pool: pool.reader.contains(keys, self._number), absent)

    def read(self, keys: Sequence[bytes], consume: Consume, *, nbytes: int) -> list[bool]:
        join_keys(keys)
        show = callers(consume)
        return self._handle.call(
            self._closed, lambda pool: pool.reader.read(keys, self._number, show, nbytes), [False] * len(keys)
        )

    def write(
        self,
        keys: Sequence[bytes],
        fill: Fill,
        *,
        nbytes: int,
        parents: Sequence[bytes | None],
        deadline_s: float,
    ) -> list[Put]:
        if len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        if keys and not 1 <= nbytes < 1 << 32:
            raise ValueError(f"a page of {nbytes} bytes: expected 1 to {(1 << 32) - 1}")
        join_keys(keys)
        join_keys([parent for parent in parents if parent is not None])
        deadline = time.monotonic() + deadline_s
        outcome: list[Put] = []
        step = max(1, min(_BATCH_PAGES, _BATCH_NBYTES // max(1, nbytes)))
        write = callers(fill)

        def write_all(pool: Pool) -> None:
            for at in range(0, len(keys) if pool.damage is None else 0, step):
                batch = slice(at, at + step)
                pages = PutPages(self._namespace, self._shard, keys[batch], parents[batch], nbytes)
                outcome.extend(self._write_batch(pool, pages, partial(_shifted, write, at), deadline))

        self._handle.call(self._closed, write_all, None)
        return outcome + [Put.FAILED] * (len(keys) - len(outcome))

    def _write_batch(self, pool: Pool, pages: PutPages, fill: Fill, deadline: float) -> list[Put]:
        """Reserve, write, commit; a fault of the pool fails what is not stored by then."""
        outcome: dict[int, str] = {}
        cause = "error"
        try:
            plan = pool.writer.reserve(pages, deadline)
            outcome.update(plan.outcome)
            self._fill_places(pool, plan, fill)
            outcome.update(pool.writer.commit(plan, deadline))
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
        return [Put(result) if result in ("stored", "present") else Put.FAILED for result in results]

    @staticmethod
    def _fill_places(pool: Pool, plan: PutPlan, fill: Fill) -> None:
        try:
            for place in plan.places:
                extents = place.extents
                if place.is_listed:
                    listed = pool.arena.views(extents[:1], 8 * (len(extents) - 1))
                    if listed is None:
                        continue
                    listed[0][:] = np.array(extents[1:], dtype="<u4").reshape(-1).view(np.uint8)
                    extents = extents[1:]
                pieces = pool.arena.views(extents, plan.pages.nbytes)
                if pieces is None:
                    continue
                whole: Bytes = pieces[0] if len(pieces) == 1 else np.empty(plan.pages.nbytes, dtype=np.uint8)
                fill(place.index, whole)
                if len(pieces) > 1:
                    spread(whole, pieces)
                place.checksum = xxhash.xxh3_64_intdigest(whole.data)
        except BaseException:
            if plan.reservation is not None:
                pool.writer.abandon(plan.reservation)
            raise

    @staticmethod
    def _count(pool: Pool, results: list[str], nbytes: int) -> None:
        stored = results.count("stored")
        pool.counters.add(
            stored_pages=stored, stored_nbytes=stored * nbytes, present_pages=results.count("present"),
            **{cause: results.count(cause) for cause in set(results) - {"stored", "present"}},
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
