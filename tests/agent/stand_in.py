"""What fetches pages, played by the test; and an agent around it in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore, Space
from store_client.agent import lock as lock_
from store_client.agent.agent import Agent
from store_client.agent.report import TierReport
from store_client.agent.tiered import TieredStore
from store_client.agent.wish import Wish, Word
from store_client.base import Lookup
from store_client.testing import DEADLINE_S, PAGE_NBYTES, SHARD, namespace
from store_client.tiers.base import SpaceName

CAPACITY = 16 << 20
UNHEARD = Lookup(0, unheard=True)

Tell = Callable[[Word], None]


class Asked:
    """A wish, and how to answer it."""

    def __init__(self, wish: Wish, tell: Tell) -> None:
        self.wish, self.tell = wish, tell
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class StandIn:
    """`Fetches` that notes what it is asked, and answers with `answer` where there is one."""

    def __init__(self, answer: Callable[[Asked], None] | None = None) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.sought: list[tuple[SpaceName, list[bytes], int, Callable[[Sequence[bool], bool], None]]] = []
        self.elsewhere: list[Shard] = []
        self.cleared: list[bytes | None] = []
        self.broken: Exception | None = None
        self.closed = False

    def ask(self, wish: Wish, tell: Tell) -> Asked:
        asked = Asked(wish, tell)
        self.asked.append(asked)
        if self.answer is not None:
            self.answer(asked)
        return asked

    def seek(
        self, space: SpaceName, keys: Sequence[bytes], nbytes: int, tell: Callable[[Sequence[bool], bool], None]
    ) -> None:
        self.sought.append((space, list(keys), nbytes, tell))

    def shards(self, namespace: Namespace, tell: Callable[[Sequence[Shard], bool], None]) -> None:
        tell(self.elsewhere, True)

    def holds(self, *asked: Any) -> Sequence[Any]:
        return []

    def clear(self, namespace: bytes | None, done: set[str]) -> None:
        if self.broken is not None:
            raise self.broken
        self.cleared.append(namespace)

    def stats(self) -> Sequence[TierReport]:
        played = TierReport(
            title="played", kind="played", reads="closed", writes="none", fetched_pages=7, errors={"timeout": 2}
        )
        return [played]

    def close(self) -> None:
        self.closed = True


def absent(asked: Asked) -> None:
    """Nothing is there."""
    asked.tell(Word(done=True, cause="absent"))


def configured(pool: Path, **changes: Any) -> Config:
    settings = {"pool": str(pool), "capacity": CAPACITY, "tiers": ["mooncake"], "agent": "external"}
    return load_config({**settings, **changes}, {})


class Running:
    """An agent in a thread."""

    def __init__(self, pool: Path, fetches: StandIn, config: Config) -> None:
        self.fetches = fetches
        EmbeddedStore(pool, CAPACITY).close()
        lock = lock_.hold(pool)
        assert lock is not None, "the pool has an agent already"
        self._lock = lock
        self.agent = Agent(pool, config, lock, idle_s=None, open_fetches=lambda store, config: fetches)
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        until(lambda: self.agent._socket is not None)  # it listens

    def _run(self) -> None:
        try:
            self.reason = self.agent.run()
        finally:
            lock_.let_go(self._lock)

    def stop(self) -> None:
        self.agent.stop("the test ends")
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()


@contextmanager
def running(pool: Path, fetches: StandIn | None = None, **changes: Any) -> Iterator[Running]:
    agent = Running(pool, fetches or StandIn(), configured(pool, **changes))
    try:
        yield agent
    finally:
        agent.stop()


@contextmanager
def tiered(pool: Path, config: Config | None = None) -> Iterator[TieredStore]:
    """A store with an agent behind it that this process is connected to."""
    with TieredStore(EmbeddedStore(pool, CAPACITY), config or configured(pool)) as store:
        until(lambda: store._client.ready)
        yield store


def space_of(store: TieredStore) -> Space:
    return store.space(namespace(), SHARD, PAGE_NBYTES)


def until(is_so: Callable[[], Any], what: str = "it did not come true") -> Any:
    """What `is_so` returns once that is true."""
    give_up_s = time.monotonic() + DEADLINE_S
    while not (found := is_so()):
        assert time.monotonic() < give_up_s, what
        time.sleep(0.005)
    return found


def settled(space: Space, keys: Sequence[bytes], expected: Lookup) -> None:
    """A lookup answers this, sooner or later."""
    until(lambda: space.lookup(keys) == expected, f"no lookup answered {expected}")
