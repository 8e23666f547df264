"""Pages in an S3-compatible object store, which many hosts use: one object is a page, its seal in front.

A page is asked for by HEAD, read by one GET and written by one PUT, all of a batch at once. A write looks first, since
what is there already need not be sent, and has the store refuse what another host wrote meanwhile; a store that cannot
refuse overwrites, and since a page's name says what its bytes are, those are the same. An object that a stranger put
in its place does not pass the seal's MAC.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from mooncake_connector.config.tiers import ObjectTier
from mooncake_connector.kv.geometry import Shard
from store_client.base import Put
from store_client.tiers.base import SEAL_NBYTES, Pieces, Purged, Sealed, SpaceName, Target, Tier, TierStats
from store_client.tiers.checks import check_keys, check_sealed, check_targets
from store_client.tiers.object.client import Bucket
from store_client.tiers.object.names import of_namespace, of_page, of_space, read_shard
from store_client.tiers.object.retention import Retention


class ObjectStore(Tier):
    """The tier `object`. Opening it asks the store once, so that wrong credentials, a missing bucket or an address
    where nothing answers are known at once (TierError)."""

    parallel = 4
    needs_mac = True

    def __init__(self, settings: ObjectTier, pool_name: str = "") -> None:
        self._bucket = Bucket(settings)
        self._retention = Retention(self._bucket, settings.capacity, settings.keep_days)
        try:
            self._bucket.one(self._bucket.probe, settings.timeout_s)
        except BaseException:
            self.close()
            raise

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        check_keys(keys)
        names = [of_page(space, key, nbytes) for key in keys]
        sizes = self._bucket.all([functools.partial(self._bucket.size, name) for name in names], deadline_s)
        return [size == nbytes + SEAL_NBYTES for size in sizes]

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        check_targets(targets, nbytes)
        names = [of_page(space, target.key, nbytes) for target in targets]
        whole = nbytes + SEAL_NBYTES
        gets = [functools.partial(self._bucket.get, name, whole) for name in names]
        # Copied by the caller's thread, and not before all requests have ended: nothing is written after the return.
        return [
            None if data is None else _spread(data, target.pieces)
            for data, target in zip(self._bucket.all(gets, deadline_s), targets, strict=True)
        ]

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        check_sealed(pages, nbytes)
        first = {page.key: page for page in reversed(pages)}
        outcomes = self._bucket.all([self._writing(space, page, nbytes) for page in first.values()], deadline_s)
        became = {key: Put.FAILED if put is None else put for key, put in zip(first, outcomes, strict=True)}
        return [
            became[page.key] if first[page.key] is page or became[page.key] is Put.FAILED else Put.PRESENT
            for page in pages
        ]

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        if not keys:
            return 0
        folders = self._bucket.one(lambda: self._bucket.folders(of_space(space)), deadline_s)
        names = [f"{folder}/{key.hex()}" for folder in folders for key in dict.fromkeys(keys)]
        sizes = self._bucket.all([functools.partial(self._bucket.size, name) for name in names], deadline_s)
        there = [name for name, size in zip(names, sizes, strict=True) if size is not None]
        return self._bucket.delete(there, deadline_s)

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        return self.purge(namespace, deadline_s=deadline_s).pages

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        folders = self._bucket.one(lambda: self._bucket.folders(of_namespace(namespace)), deadline_s)
        return [shard for shard in map(read_shard, folders) if shard is not None]

    def purge(
        self,
        namespace: bytes | None,
        *,
        older_than_s: float | None = None,
        larger_than_nbytes: int | None = None,
        deadline_s: float,
    ) -> Purged:
        return self._retention.purge(namespace, older_than_s, larger_than_nbytes, deadline_s)

    def stats(self) -> TierStats:
        bucket, kept = self._bucket, self._retention.counted
        notes = {"address": bucket.address, "requests": _counted(bucket.requests)}
        if bucket.failures:
            notes["failed requests"] = _counted(bucket.failures)
        return TierStats(
            capacity_nbytes=self._retention.capacity_nbytes,
            used_nbytes=kept and kept.nbytes,
            pages=kept and kept.pages,
            evicted_pages=self._retention.evicted_pages,
            notes=notes,
        )

    def tidy(self, deadline_s: float) -> None:
        self._retention.tidy(deadline_s)

    def close(self) -> None:
        self._bucket.close()

    def _writing(self, space: SpaceName, page: Sealed, nbytes: int) -> Callable[[], Awaitable[Put]]:
        name = of_page(space, page.key, nbytes)

        async def request() -> Put:
            size = await self._bucket.size(name)
            if size == nbytes + SEAL_NBYTES:
                return Put.PRESENT
            # One copy, so that what is sent, and sent again, does not change, whenever the caller's bytes do.
            content = b"".join([page.seal, *(piece.data for piece in page.pieces)])
            # What is there in another size was cut, or is a stranger's, and is replaced.
            stored = await self._bucket.put(name, content, absent=size is None)
            return Put.STORED if stored else Put.PRESENT

        return request


def _spread(data: object, pieces: Pieces) -> bytes:
    """Copy what lies behind the seal into the pieces; return the seal."""
    found = np.frombuffer(data, dtype=np.uint8)  # type: ignore[call-overload]
    at = SEAL_NBYTES
    for piece in pieces:
        piece[:] = found[at : at + len(piece)]
        at += len(piece)
    return found[:SEAL_NBYTES].tobytes()


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(dict(counts).items()))
