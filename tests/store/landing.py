"""A store whose pages come from elsewhere, one by one: it says which are on their way, and checks each that is read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import xxhash

from store_client.base import Bytes, Lookup, Put, Shard
from store_client.testing import page_bytes

GATE_S = 60.0
"""A gate that nobody opens fails the test instead of hanging it."""


class LandingSpace:
    """Duck-typed `Space` in memory. `expected` are keys whose pages are said to be on their way: maybe, or where
    `sure` as coming. `deaf` lookups are answered as if it had not heard of that yet, and where it is `silent` all as if
    it hears of nothing from who brings them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.expected: set[bytes] = set()
        self.sure = self.silent = False
        self.deaf = 0
        self.announced: list[list[bytes]] = []
        self.refused = False
        self._pages: dict[bytes, tuple[Bytes, int]] = {}
        self._gate = threading.Semaphore(1_000_000)
        self.entered = threading.Semaphore(0)
        """One for each read that began."""

    def land(self, keys: Sequence[bytes], *, wrong: bool = False) -> None:
        for key in keys:
            page = page_bytes(key, self.nbytes)
            checksum = xxhash.xxh3_64_intdigest(page)
            if wrong:
                page[self.nbytes // 2] ^= 1
            self._pages[key] = page, checksum
            self.expected.discard(key)

    def hold_reads(self) -> None:
        """From now on each read waits for a `let_read`."""
        self._gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def let_read(self, times: int = 1) -> None:
        self._gate.release(times)

    def wait_for_read(self) -> None:
        assert self.entered.acquire(timeout=GATE_S), "nothing was read"

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        count = next((number for number, key in enumerate(keys) if key not in self._pages), len(keys))
        rest = keys[count:]
        coming = next((number for number, key in enumerate(rest) if key not in self.expected), len(rest))
        if self.silent:
            return Lookup(count, unheard=count < len(keys))
        if self.deaf:
            self.deaf -= 1
            coming = 0
        return Lookup(count, coming=coming) if self.sure else Lookup(count, coming > 0)

    def prefetch(self, keys: Sequence[bytes], **_: Any) -> None:
        self.announced.append(list(keys))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._pages for key in keys]

    def read(self, keys: Sequence[bytes], consume: Any, *, nbytes: int, **_: Any) -> list[bool]:
        self.entered.release()
        assert self._gate.acquire(timeout=GATE_S), "a read was held and never let through"
        return [self._show(number, key, consume) for number, key in enumerate(keys)]

    def _show(self, number: int, key: bytes, consume: Any) -> bool:
        page, checksum = self._pages.get(key, (None, 0))
        if page is None or xxhash.xxh3_64_intdigest(page) != checksum:
            return False
        consume(number, page)
        return True

    def write(self, keys: Sequence[bytes], fill: Any, *, nbytes: int, **_: Any) -> list[Put]:
        if self.refused:
            return [Put.FAILED] * len(keys)
        for number, key in enumerate(keys):
            page = page_bytes(b"blank", nbytes)
            fill(number, page)
            self._pages[key] = page, xxhash.xxh3_64_intdigest(page)
        return [Put.STORED] * len(keys)


class LandingStore:
    """Duck-typed `Store` with one space."""

    def __init__(self, space: LandingSpace) -> None:
        self._space = space

    def space(self, namespace: Any, shard: Shard, nbytes: int | None = None) -> LandingSpace:
        return self._space

    def shards(self, namespace: Any) -> list[Shard]:
        return []

    def shards_elsewhere(self, namespace: Any) -> list[Shard]:
        return []
