"""A pool, tiers in memory and the flow between them, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import xxhash
from agent.memory_tier import MemoryTier
from simulated.waiting import wait_for

from mooncake_connector.config.tiers import DiskTier, TierSettings
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore
from store_client.agent.flow import Ask, Flow
from store_client.agent.wish import Wish, Word
from store_client.embedded import EmbeddedSpace
from store_client.testing import PAGE_NBYTES, SHARD, get_page, namespace, page_bytes
from store_client.tiers.base import SpaceName
from store_client.tiers.seal import seal

PATIENT_S = 120.0
SECRET = b"the secret of a deployment in tests"


def settings(name: str = "memory", **fields: Any) -> TierSettings:
    return DiskTier(name=name, path="/nowhere", capacity=1 << 30, **{"write": "none", "timeout_s": PATIENT_S, **fields})


def put_into(
    tier: MemoryTier,
    keys: Sequence[bytes],
    nbytes: int = PAGE_NBYTES,
    name: Namespace | None = None,
    secret: bytes = b"",
) -> None:
    """Have a tier hold the right pages."""
    space = SpaceName((name or namespace()).digest, SHARD)
    for key in keys:
        page = page_bytes(key, nbytes)
        sealed = seal(space, key, [page], xxhash.xxh3_64_intdigest(page.data), secret)
        tier.pages[space, key] = page, sealed


def wish_for(keys: Sequence[bytes], deadline_s: float = PATIENT_S, **fields: Any) -> Wish:
    given = {"namespace": namespace(), "shard": SHARD, "parent": None, "nbytes": PAGE_NBYTES, **fields}
    return Wish(keys=keys, deadline_s=deadline_s, **given)


class Listener:
    """Remembers what a wish was told."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._changed = threading.Condition()

    def __call__(self, word: Word) -> None:
        with self._changed:
            self.words.append(word)
            self._changed.notify_all()

    def wait(self, until: Any) -> Word:
        """The first word for which `until` holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(until, self.words)), PATIENT_S), self.words
            return next(filter(until, self.words))

    def end(self) -> Word:
        word = self.wait(lambda word: word.done)
        assert self.words[-1] == word, "nothing is said after the end"
        return word


@contextmanager
def flowing(store: EmbeddedStore, *tiers: Any, secret: bytes = b"") -> Iterator[Flow]:
    """`tiers` are tiers, or pairs of settings and a tier."""
    pairs = [each if isinstance(each, tuple) else (settings(f"tier-{n}"), each) for n, each in enumerate(tiers)]
    flow = Flow(store, pairs, secret)
    try:
        yield flow
    finally:
        for _, tier in pairs:
            if isinstance(tier, MemoryTier):
                tier.listen.set()
        flow.close()
        wait_until(lambda: not any(lane.busy for source in flow._sources for lane in source.lanes))


def fetch(flow: Flow, keys: Sequence[bytes], **fields: Any) -> tuple[Word, Listener]:
    """Ask, and wait for the end."""
    listener = Listener()
    flow.ask(wish_for(keys, **fields), listener)
    return listener.end(), listener


def ask(flow: Flow, keys: Sequence[bytes], **fields: Any) -> tuple[Ask, Listener]:
    listener = Listener()
    return flow.ask(wish_for(keys, **fields), listener), listener


def is_right(space: EmbeddedSpace, key: bytes, nbytes: int = PAGE_NBYTES) -> bool:
    got = get_page(space, key, nbytes)
    return got is not None and np.array_equal(got, page_bytes(key, nbytes))


def wait_until(holds: Any) -> None:
    wait_for(holds)
