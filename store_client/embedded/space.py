"""`EmbeddedSpace`: the pages of one namespace and shard in the embedded pool.

Faults of the pool end here: a miss or a failed put, a counter and one log line.
"""

import threading
import time
from collections.abc import Collection, Sequence

import numpy as np

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import Namespace
from store_client.base import Consume, Fill, Lookup, Position, Put, Settle, SettleFirst, Space
from store_client.embedded.evicted import refusal
from store_client.embedded.faults import callers
from store_client.embedded.names import Bools, hash_keys, identify, join_keys
from store_client.embedded.pool import Pool
from store_client.embedded.put import PutPages
from store_client.embedded.putting import ByDevice, FillAll, Locked, OneByOne, Patience, Putting, Together, Way, at_once
from store_client.embedded.reader import ConsumeAll
from store_client.embedded.registry import Handle
from store_client.embedded.table import BROUGHT
from store_client.fate import UNKNOWN, Fate, Known

_FORGET_WAIT_S = 5.0
"""For the pool's lock."""
_UNCOUNTED = ("stored", "present", "unfilled", "cleared")
"""What is no fault of the pool."""


class EmbeddedSpace(Space):
    def __init__(self, handle: Handle, closed: threading.Event, namespace: Namespace, shard: Shard) -> None:
        self._handle, self._closed = handle, closed
        self._namespace, self._shard = namespace, shard
        self.is_private = namespace.is_private
        """Whether nobody but the instance that stores its pages can ever read them."""
        self._number = identify((namespace.digest, shard))

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        """As `Space.lookup`; all there is to know is known at once."""
        if keys and len(keys[0]) != KEY_NBYTES:
            join_keys(keys[:1])
        return Lookup(self._handle.look(self._closed, lambda pool: pool.reader.prefix(keys, self._number), 0))

    def leading_since(self, keys: Sequence[bytes], since: Position | None) -> tuple[Position | None, int | None]:
        """Where the feed of the pool's changes ends, and how many leading pages are present; None where the feed still
        ends at `since`, so lookups find what they found. (None, 0) where there is no pool."""
        if keys and len(keys[0]) != KEY_NBYTES:
            join_keys(keys[:1])

        def look(pool: Pool) -> tuple[Position | None, int | None]:
            position = pool.feed.position()
            return position, None if position == since else pool.reader.prefix(keys, self._number)

        nothing: tuple[Position | None, int | None] = None, 0
        return self._handle.look(self._closed, look, nothing)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if len(keys) != 1 or len(keys[0]) != KEY_NBYTES:
            join_keys(keys)
        absent = [False] * len(keys)
        return self._handle.look(self._closed, lambda pool: pool.reader.contains(keys, self._number), absent)

    def present(self, keys: Sequence[bytes]) -> Bools:
        """As `contains`, of keys of the right length, for whoever asks about many and can bear a mistake: of a page
        that is absent it says once in 2^27 that it is there."""
        absent = np.zeros(len(keys), dtype=np.bool_)
        return self._handle.look(self._closed, lambda pool: pool.reader.present(keys, self._number), absent)

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
        settle: SettleFirst | None = None,
    ) -> list[Put]:
        pages = PutPages(self._namespace, self._shard, keys, parents, nbytes)
        way = OneByOne(callers(fill)) if settle is None else ByDevice(callers(fill), callers(settle))
        return self._put(pages, way, deadline_s)

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
        locked: Locked = at_once,
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
        return self._put(pages, Together(callers(fill)), deadline_s, locked)

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

    def _put(self, pages: PutPages, way: Way, deadline_s: float, locked: Locked = at_once) -> list[Put]:
        keys, parents, nbytes = pages.keys, pages.parents, pages.nbytes
        if len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        if keys and not 1 <= nbytes < 1 << 32:
            raise ValueError(f"a page of {nbytes} bytes: expected 1 to {(1 << 32) - 1}")
        join_keys(keys)
        join_keys([parent for parent in parents if parent is not None])
        outcome: list[Put] = []

        def write_all(pool: Pool) -> None:
            def tell(some: PutPages, results: list[str]) -> None:
                # First: what fails behind it must not leave the results of further batches in this one's place.
                outcome.extend(Put(one) if one in ("stored", "present") else Put.FAILED for one in results)
                self._count(pool, results, nbytes)
                self._remember_refused(pool, some, results)

            if pool.damage is None:
                Putting(pool, way, Patience(deadline_s), locked, tell).run(pages)

        self._handle.call(self._closed, write_all, None)
        return outcome + [Put.FAILED] * (len(keys) - len(outcome))

    def _remember_refused(self, pool: Pool, pages: PutPages, results: list[str]) -> None:
        for cause in set(results).difference(_UNCOUNTED):
            refused = [key for key, result in zip(pages.keys, results, strict=True) if result == cause]
            pool.evicted.note(hash_keys(join_keys(refused), self._number), refusal(cause))

    @staticmethod
    def _count(pool: Pool, results: list[str], nbytes: int) -> None:
        stored = results.count("stored")
        pool.counters.add(
            stored_pages=stored, stored_nbytes=stored * nbytes, present_pages=results.count("present"),
            **{cause: results.count(cause) for cause in set(results).difference(_UNCOUNTED)},
        )  # fmt: skip

    def remove(self, keys: Sequence[bytes]) -> int:
        join_keys(keys)
        deadline = time.monotonic() + _FORGET_WAIT_S
        return self._handle.call(self._closed, lambda pool: pool.writer.forget_keys(keys, self._number, deadline), 0)

    def clear(self) -> int:
        return self._handle.call(self._closed, lambda pool: pool.writer.clear({self._number}, _FORGET_WAIT_S), 0)

    def record_lookup(self, *, hit_pages: int, missed_pages: int, page_tokens: int) -> None:
        counts = {
            "hit_pages": hit_pages, "missed_pages": missed_pages, "hit_tokens": hit_pages * page_tokens,
            "missed_tokens": missed_pages * page_tokens,
        }  # fmt: skip
        self._handle.look(self._closed, lambda pool: pool.counters.add(**counts), None)
