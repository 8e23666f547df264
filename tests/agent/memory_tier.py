"""A tier in memory that goes wrong on demand: for faults that no real tier can be made to have at a chosen moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from mooncake_connector.kv.geometry import Shard
from store_client.base import Bytes, Put
from store_client.embedded.arena import gather, spread
from store_client.tiers.base import Sealed, SpaceName, Target, Tier, TierError, TierStats

HANG_S = 120.0


class MemoryTier(Tier):
    """Switches may be set at any time; they hold for calls that begin later.

    `failing`: this TierError is raised. `lying`: says that it has every page. `corrupt`: the first byte of what it
    gives is another one. `deaf`: calls of these names hang until `listen` is set.
    """

    def __init__(self, *, batch_nbytes: int = 4 * 65536, parallel: int = 2, needs_mac: bool = False) -> None:
        self.batch_nbytes, self.parallel, self.needs_mac = batch_nbytes, parallel, needs_mac
        self.pages: dict[tuple[SpaceName, bytes], tuple[Bytes, bytes]] = {}
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.failing: TierError | None = None
        self.lying = self.corrupt = False
        self.deaf: set[str] = set()
        self.listen = threading.Event()
        self.before: dict[str, Callable[[], None]] = {}
        """By name of a call, what happens first in it."""
        self.memory: Bytes | None = None
        self.is_closed = False
        self._lock = threading.Lock()

    def made(self, name: str) -> list[tuple[bytes, ...]]:
        """Keys of the calls of a name so far."""
        with self._lock:
            return [keys for call, keys in self.calls if call == name]

    def stored(self) -> list[bytes]:
        """Of what it has, in the order in which it was stored."""
        with self._lock:
            return [key for _, key in self.pages]

    def _call(self, name: str, keys: Sequence[bytes] = ()) -> None:
        with self._lock:
            self.calls.append((name, tuple(keys)))
        assert not self.is_closed, "a call under way or to come while it is closed"
        self.before.get(name, lambda: None)()
        if name in self.deaf:
            self.listen.wait(HANG_S)
        if self.failing is not None:
            raise self.failing

    def register(self, memory: Bytes) -> None:
        self.memory = memory

    def contains(self, space: SpaceName, keys: Sequence[bytes], *, nbytes: int, deadline_s: float) -> list[bool]:
        self._call("contains", keys)
        return [self.lying or ((space, key) in self.pages and len(self.pages[space, key][0]) == nbytes) for key in keys]

    def read(
        self, space: SpaceName, targets: Sequence[Target], *, nbytes: int, deadline_s: float
    ) -> list[bytes | None]:
        self._call("read", [target.key for target in targets])
        seals: list[bytes | None] = []
        for key, pieces in targets:
            assert self.memory is None or all(np.shares_memory(piece, self.memory) for piece in pieces)
            page, seal = self.pages.get((space, key), (None, None))
            if page is not None:
                spread(page, pieces)
                if self.corrupt:
                    pieces[0][0] ^= 1
            seals.append(seal)
        return seals

    def write(self, space: SpaceName, pages: Sequence[Sealed], *, nbytes: int, deadline_s: float) -> list[Put]:
        self._call("write", [page.key for page in pages])
        puts = []
        for key, pieces, seal in pages:
            present = (space, key) in self.pages
            if not present:
                whole = gather(pieces, nbytes)
                with self._lock:
                    self.pages[space, key] = whole, seal
            puts.append(Put.PRESENT if present else Put.STORED)
        return puts

    def remove(self, space: SpaceName, keys: Sequence[bytes], *, deadline_s: float) -> int:
        self._call("remove", keys)
        with self._lock:
            return sum(self.pages.pop((space, key), None) is not None for key in keys)

    def clear(self, namespace: bytes | None, *, deadline_s: float) -> int:
        self._call("clear")
        with self._lock:
            gone = [name for name in self.pages if namespace in (None, name[0].namespace)]
            for name in gone:
                del self.pages[name]
        return len(gone)

    def shards(self, namespace: bytes, *, deadline_s: float) -> list[Shard]:
        self._call("shards")
        with self._lock:
            return list({space.shard for space, _ in self.pages if space.namespace == namespace})

    def stats(self) -> TierStats:
        return TierStats(pages=len(self.pages))

    def tidy(self, deadline_s: float) -> None:
        self._call("tidy")

    def close(self) -> None:
        self.is_closed = True
