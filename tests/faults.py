"""A second implementation of `Store`, whose answers can be late, missing, wrong and counted, over the embedded one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.around import SpaceAround, StoreAround
from store_client.base import Lookup, Put, Space, Store

GATE_S = 60.0
"""A gate that nobody opens fails the test instead of hanging it."""


class Faults:
    """What is wrong with the pool just now, and what it was asked so far.

    Args (attributes): `answer(keys, found)` gives the answer to a lookup in place of `found`; `reads_held` and
    `writes_held` stop every read and write until the gate is opened; `lose_reads(keys)` says which keys of a read are
    reported as lost, `lose_reads_of[shard]` how many are not;
    `refuse_writes` fails every put; calls named in `raise_in` raise.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.written: Counter[tuple[Shard, bytes]] = Counter()
        self.announced: list[tuple[Shard, list[bytes], dict[str, Any]]] = []
        """Every `prefetch`: whose, which keys, and what was said beside."""
        self.answer: Callable[[Sequence[bytes], Lookup], Lookup] | None = None
        self.lose_reads: Callable[[Sequence[bytes]], list[bool]] | None = None
        self.lose_reads_of: dict[Shard, int] = {}
        self.refuse_writes = False
        self.raise_in: set[str] = set()
        self._reads = threading.Event()
        self._reads_of: dict[Shard, threading.Event] = {}
        self._writes = threading.Event()
        self.reading = threading.Event()
        self.writing = threading.Event()
        self.release()

    def hold_reads(self) -> None:
        self._reads.clear()
        for one in list(self._reads_of.values()):  # a read that waits already goes on waiting, until it is released
            one.clear()
        self.reading.clear()

    def hold_writes(self) -> None:
        self._writes.clear()
        self.writing.clear()

    def release(self) -> None:
        self._reads.set()
        self._writes.set()
        for one in list(self._reads_of.values()):
            one.set()

    def let_through(self, shard: Shard) -> None:
        """Open the gate for the reads of one shard alone."""
        self._gate(shard).set()

    def _gate(self, shard: Shard) -> threading.Event:
        """One for each shard, whichever thread asks first."""
        return self._reads_of.setdefault(shard, threading.Event())

    def note(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.raise_in:
            raise OSError(f"{call}: made to fail")

    def wait_to_read(self, shard: Shard) -> None:
        self.reading.set()
        gate = self._gate(shard)  # before the look at all gates: `release` opens those that it knows
        if not self._reads.is_set():
            assert gate.wait(GATE_S), "a read was held and never released"

    def wait_to_write(self) -> None:
        self.writing.set()
        assert self._writes.wait(GATE_S), "a write was held and never released"


def never(keys: Sequence[bytes], found: Lookup) -> Lookup:
    """Of nothing is it ever known whether it is there."""
    return Lookup(0, pending=bool(keys))


def lying(keys: Sequence[bytes], found: Lookup) -> Lookup:
    """Everything is there."""
    return Lookup(len(keys))


class Late:
    """Says only every `asked`-th time what is there of a chain; `before` of its pages until then, pending."""

    def __init__(self, asked: int, before: int = 0) -> None:
        self._asked, self._before = asked, before
        self.times: Counter[bytes] = Counter()

    def __call__(self, keys: Sequence[bytes], found: Lookup) -> Lookup:
        if not keys:
            return found
        self.times[keys[-1]] += 1
        if self.times[keys[-1]] % self._asked == 0:
            return found
        pages = min(self._before, found.pages)
        return Lookup(pages, pending=pages < len(keys))


class Arrivals:
    """Pages that are there count once they have landed; until then the store says of those `promised` that they come.

    `deaf` lookups of loads are answered as if the store had not heard of anything yet from who brings them.
    """

    def __init__(self, promised: Sequence[bytes], deaf: int = 0) -> None:
        self.promised = set(promised)
        self.landed: set[bytes] = set()
        self.deaf = deaf

    def land(self, keys: Sequence[bytes]) -> None:
        self.landed.update(keys)

    def __call__(self, keys: Sequence[bytes], found: Lookup) -> Lookup:
        pages = next((number for number, key in enumerate(keys) if key not in self.landed), len(keys))
        if self.deaf and threading.current_thread().name == "mooncake-connector-load":
            self.deaf -= 1
            return Lookup(pages, unheard=pages < len(keys))
        rest = keys[pages:]
        coming = next((number for number, key in enumerate(rest) if key not in self.promised), len(rest))
        return Lookup(pages, coming=coming)


class FaultySpace(SpaceAround):
    """Everything goes to the real one, after the faults had their say."""

    def __init__(self, space: Space, shard: Shard, faults: Faults) -> None:
        super().__init__(space)
        self._shard, self._faults = shard, faults

    def lookup(self, keys: Sequence[bytes]) -> Lookup:
        self._faults.note("lookup")
        found = super().lookup(keys)
        return found if self._faults.answer is None else self._faults.answer(keys, found)

    def prefetch(self, keys: Sequence[bytes], **kwargs: Any) -> None:
        self._faults.note("prefetch")
        self._faults.announced.append((self._shard, list(keys), kwargs))
        super().prefetch(keys, **kwargs)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._faults.note("contains")
        return super().contains(keys)

    def read(self, keys: Sequence[bytes], consume: Any, **kwargs: Any) -> list[bool]:
        faults = self._faults
        faults.note("read")
        faults.wait_to_read(self._shard)
        found = super().read(keys, consume, **kwargs)
        if faults.lose_reads is not None:
            found = [one and not lost for one, lost in zip(found, faults.lose_reads(keys), strict=True)]
        if self._shard in faults.lose_reads_of:
            found = [one and index < faults.lose_reads_of[self._shard] for index, one in enumerate(found)]
        return found

    def write(self, keys: Sequence[bytes], fill: Any, **kwargs: Any) -> list[Put]:
        faults = self._faults
        faults.note("write")
        faults.wait_to_write()
        if faults.refuse_writes:
            return [Put.FAILED] * len(keys)
        results = super().write(keys, fill, **kwargs)
        faults.written.update((self._shard, key) for key, put in zip(keys, results, strict=True) if put is Put.STORED)
        return results

    def record_lookup(self, **kwargs: Any) -> None:
        self._faults.note("record_lookup")
        super().record_lookup(**kwargs)


class FaultyStore(StoreAround):
    """A store of faulty spaces, over the real one."""

    def __init__(self, store: Store, faults: Faults) -> None:
        super().__init__(store)
        self._faults = faults

    def space(self, namespace: Namespace, shard: Shard, nbytes: int | None = None) -> FaultySpace:
        self._faults.note("space")
        return FaultySpace(self._inner.space(namespace, shard, nbytes), shard, self._faults)

    def await_word(self) -> None:
        self._faults.note("await_word")
        super().await_word()


def faulty_opening(faults: Faults, open_store: Callable[[Config], Store]) -> Callable[[Config], FaultyStore]:
    """Stands in for `open_store`."""
    return lambda config: FaultyStore(open_store(config), faults)
