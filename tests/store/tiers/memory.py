"""The plainest tier: a dictionary. What it does is what the conformance class asks for, and no more."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from mooncake_connector.kv.geometry import Shard
from store_client.base import Bytes, Put
from store_client.tiers.base import Sealed, SpaceName, Target, Tier, TierError, TierStats
from store_client.tiers.checks import check_keys, check_sealed, check_targets


class MemoryTier(Tier):
    def __init__(self) -> None:
        self._pages: dict[tuple[SpaceName, bytes], tuple[bytes, Bytes]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("this tier is closed", "unavailable")

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        self._check_open()
        check_keys(keys)
        with self._lock:
            found = [self._pages.get((space, key)) for key in keys]
        return [page is not None and len(page[1]) == nbytes for page in found]

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        self._check_open()
        check_targets(targets, nbytes)
        return [self._read(space, target, nbytes) for target in targets]

    def _read(self, space: SpaceName, target: Target, nbytes: int) -> bytes | None:
        with self._lock:
            seal, page = self._pages.get((space, target.key), (b"", np.zeros(0, dtype=np.uint8)))
        if len(page) != nbytes or not seal:
            return None
        at = 0
        for piece in target.pieces:
            piece[:] = page[at : at + len(piece)]
            at += len(piece)
        return seal

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        self._check_open()
        check_sealed(pages, nbytes)
        outcome = []
        for page in pages:
            content = (page.seal, np.concatenate(page.pieces))
            with self._lock:
                stored = self._pages.setdefault((space, page.key), content) is content
            outcome.append(Put.STORED if stored else Put.PRESENT)
        return outcome

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        self._check_open()
        check_keys(keys)
        with self._lock:
            return sum(self._pages.pop((space, key), None) is not None for key in keys)

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        self._check_open()
        with self._lock:
            gone = [name for name in self._pages if namespace in (None, name[0].namespace)]
            for name in gone:
                del self._pages[name]
        return len(gone)

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        self._check_open()
        with self._lock:
            return list({space.shard for space, _ in self._pages if space.namespace == namespace})

    def stats(self) -> TierStats:
        self._check_open()
        with self._lock:
            return TierStats(used_nbytes=sum(len(page) for _, page in self._pages.values()), pages=len(self._pages))

    def close(self) -> None:
        self._closed = True
