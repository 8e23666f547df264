"""A store that passes everything on to another one: what stands in front of a store overrides what it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.base import (
    Changes,
    Consume,
    Fill,
    Lookup,
    Position,
    Progress,
    Put,
    Seen,
    Settle,
    SettleFirst,
    Space,
    SpaceInfo,
    Store,
    StoreStats,
    VerifyReport,
)
from store_client.fate import Fate
from store_client.memory_locks import MemoryLocks


class SpaceAround(Space):
    """As `inner` in everything that a subclass does not override."""

    def __init__(self, inner: Space) -> None:
        self._inner = inner

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        return self._inner.lookup(keys)

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        parent: bytes | None = None,
        prefill_tokens_s: float | None = None,
        deadline_s: float = 30.0,
        patient: bool = False,
    ) -> None:
        self._inner.prefetch(
            keys, parent=parent, prefill_tokens_s=prefill_tokens_s, deadline_s=deadline_s, patient=patient
        )

    def seek(self, keys: Sequence[bytes], *, prefill_s: float | None = None) -> Seen:
        return self._inner.seek(keys, prefill_s=prefill_s)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.contains(keys)

    def explain(self, keys: Sequence[bytes]) -> list[Fate]:
        return self._inner.explain(keys)

    def read(self, keys: Sequence[bytes], consume: Consume, *, nbytes: int, settle: Settle | None = None) -> list[bool]:
        return self._inner.read(keys, consume, nbytes=nbytes, settle=settle)

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
        return self._inner.write(keys, fill, nbytes=nbytes, parents=parents, deadline_s=deadline_s, settle=settle)

    def remove(self, keys: Sequence[bytes]) -> int:
        return self._inner.remove(keys)

    def clear(self) -> int:
        return self._inner.clear()

    def record_lookup(self, *, hit_pages: int, missed_pages: int, page_tokens: int) -> None:
        self._inner.record_lookup(hit_pages=hit_pages, missed_pages=missed_pages, page_tokens=page_tokens)


class StoreAround(Store):
    """As `inner`, which it owns from now on, in everything that a subclass does not override."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def space(self, namespace: Namespace, shard: Shard, nbytes: int | None = None) -> Space:
        return self._inner.space(namespace, shard, nbytes)

    def shards(self, namespace: Namespace) -> list[Shard]:
        return self._inner.shards(namespace)

    def shards_elsewhere(self, namespace: Namespace) -> list[Shard]:
        return self._inner.shards_elsewhere(namespace)

    def await_word(self) -> None:
        self._inner.await_word()

    def changes(self, since: Position | None = None, limit: int = 4096) -> Changes:
        return self._inner.changes(since, limit)

    def namespaces(self) -> list[SpaceInfo]:
        return self._inner.namespaces()

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def take_failures(self) -> Mapping[str, int]:
        return self._inner.take_failures()

    def lock_memory(self, locks: MemoryLocks) -> None:
        self._inner.lock_memory(locks)

    def note_request(self, name: str, told: bytes) -> None:
        self._inner.note_request(name, told)

    def clear(self, namespace_digest: bytes | None = None) -> int:
        return self._inner.clear(namespace_digest)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        return self._inner.verify(progress)

    def close(self) -> None:
        self._inner.close()
