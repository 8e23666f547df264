"""A store in this process's memory: a second one beside the embedded pool, so that no interface is that one's only."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_connector.kv.namespace import Namespace
from store_client import Lookup, Put, Space
from store_client.base import (
    Bytes,
    Change,
    Changes,
    Consume,
    Fill,
    Position,
    Progress,
    Settle,
    SettleFirst,
    Shard,
    SpaceInfo,
    Store,
    StoreStats,
    VerifyReport,
)  # fmt: skip
from store_client.embedded.names import join_keys

RING = 1000
"""Changes that are remembered."""


@dataclass
class Counts:
    stored_pages: int = 0
    present_pages: int = 0
    read_pages: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0


@dataclass
class Memory:
    pages: dict[tuple[bytes, Shard, bytes], Bytes] = field(default_factory=dict)
    names: dict[tuple[bytes, Shard], Namespace] = field(default_factory=dict)
    log: list[Change] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    closed: bool = False

    def tell(self, stored: bool, name: tuple[bytes, Shard], key: bytes, page: Bytes) -> None:
        self.log.append(Change(stored, *name, len(page), (key,)))

    def forget(self, names: Sequence[tuple[bytes, Shard, bytes]]) -> int:
        for digest, shard, key in names:
            self.tell(False, (digest, shard), key, self.pages.pop((digest, shard, key)))
        return len(names)


class MemorySpace(Space):
    def __init__(self, memory: Memory, namespace: Namespace, shard: Shard) -> None:
        self._memory, self._namespace, self._name = memory, namespace, (namespace.digest, shard)

    def _page(self, key: bytes) -> Bytes | None:
        return None if self._memory.closed else self._memory.pages.get((*self._name, key))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        join_keys(keys)
        return [self._page(key) is not None for key in keys]

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        return Lookup(sum(itertools.takewhile(bool, self.contains(keys))))

    def read(self, keys: Sequence[bytes], consume: Consume, *, nbytes: int, settle: Settle | None = None) -> list[bool]:
        done: list[bool] = []
        try:
            self._show(keys, consume, nbytes, done)
        finally:
            if settle is not None and any(done):
                settle()
        self._memory.counts.read_pages += sum(done)
        return done

    def _show(self, keys: Sequence[bytes], consume: Consume, nbytes: int, done: list[bool]) -> None:
        for i, page in enumerate(map(self._page, keys)):
            done.append(page is not None and len(page) == nbytes)
            if page is not None and done[-1]:
                consume(i, page)

    def write(
        self, keys: Sequence[bytes], fill: Fill, *, nbytes: int, parents: Sequence[bytes | None], deadline_s: float,
        settle: SettleFirst | None = None,
    ) -> list[Put]:  # fmt: skip
        if len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        if self._memory.closed:
            return [Put.FAILED] * len(keys)
        filled: dict[bytes, Bytes] = {}
        try:
            for i, key in enumerate(keys):
                if self._page(key) is None and key not in filled:
                    filled[key] = np.empty(nbytes, dtype=np.uint8)
                    fill(i, filled[key])
        finally:
            if settle is not None and filled:
                settle(len(filled))
        outcome = [Put.PRESENT] * len(keys)
        for key, page in filled.items():
            page.flags.writeable = False
            self._memory.names[self._name] = self._namespace
            self._memory.pages[(*self._name, key)] = page
            self._memory.tell(True, self._name, key, page)
            outcome[list(keys).index(key)] = Put.STORED
        self._memory.counts.stored_pages += len(filled)
        self._memory.counts.present_pages += len(keys) - len(filled)
        return outcome

    def remove(self, keys: Sequence[bytes]) -> int:
        return self._memory.forget([(*self._name, key) for key in set(keys) if self._page(key) is not None])

    def clear(self) -> int:
        return self._memory.forget([name for name in self._memory.pages if name[:2] == self._name])

    def record_lookup(self, *, hit_pages: int, missed_pages: int, page_tokens: int) -> None:
        self._memory.counts.hit_tokens += hit_pages * page_tokens
        self._memory.counts.missed_tokens += missed_pages * page_tokens


class MemoryStore(Store):
    def __init__(self) -> None:
        self._memory = Memory()

    def space(self, namespace: Namespace, shard: Shard, nbytes: int | None = None) -> MemorySpace:
        return MemorySpace(self._memory, namespace, shard)

    def shards(self, namespace: Namespace) -> list[Shard]:
        names = [] if self._memory.closed else self._memory.names
        return [shard for digest, shard in names if digest == namespace.digest]

    def changes(self, since: Position | None = None, limit: int = 4096) -> Changes:
        log = self._memory.log
        if since is None or self._memory.closed or len(log) - since[0] > RING:
            return Changes((), (len(log), 0), gap=True)
        told = log[since[0] : since[0] + limit]
        return Changes(tuple(told), (since[0] + len(told), 0), gap=False)

    def namespaces(self) -> list[SpaceInfo]:
        infos = []
        for name, namespace in self._memory.names.items():
            sizes = [len(page) for held, page in self._memory.pages.items() if held[:2] == name]
            infos.append(SpaceInfo(namespace, name[1], len(sizes), sum(sizes), 0.0, 0.0))
        return infos

    def stats(self) -> StoreStats:
        pages = self._memory.pages
        used = sum(map(len, pages.values()))
        return StoreStats("memory", 1 << 40, used, len(pages), 0, 1 << 40, **vars(self._memory.counts))

    def clear(self, namespace_digest: bytes | None = None) -> int:
        names = [name for name in self._memory.pages if namespace_digest in (None, name[0])]
        return self._memory.forget(names)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        pages = self._memory.pages
        for done in range(len(pages)):
            if progress is not None:
                progress(done + 1, len(pages))
        return VerifyReport(len(pages), sum(map(len, pages.values())), 0)

    def close(self) -> None:
        self._memory.closed = True
