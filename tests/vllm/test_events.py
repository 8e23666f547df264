"""KV events: what a router learns of the pool, and that it can read what the publisher of either vLLM makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from cases import PROMPT, Start, every_runner
from harness import PATIENCE_S, Engine
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from mooncake_connector.kv.keys import page_keys
from store_client import EmbeddedStore, Put, Space
from store_client.testing import SHARD, chain, namespace, put_chain
from vllm_plugin.prefix import announced

OTHER = list(range(200, 300))


def published(engine: Engine) -> list[Any]:
    events: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: events.extend(
        event for event in batch.events if getattr(event, "medium", "CPU") == "CPU"
    )
    return events


@every_runner
def test_a_page_is_announced_when_every_worker_has_it(start: Start, faults) -> None:
    engine = start(tp_size=2, events=True)
    events = published(engine)
    faults.hold_writes()
    engine.answer(PROMPT, name="r")
    assert not events
    faults.release()
    engine.run()
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [key for event in stored for key in event.block_hashes] == page_keys(PROMPT, 16)
    assert [token for event in stored for token in event.token_ids] == PROMPT[:96]
    assert stored[0].parent_block_hash is None
    assert {event.block_size for event in stored} == {16}


def test_a_page_that_was_not_stored_is_not_announced(start: Start, faults) -> None:
    faults.refuse_writes = True
    engine = start(events=True)
    events = published(engine)
    engine.ask(PROMPT)
    assert not events


def test_a_reset_is_announced(start: Start) -> None:
    engine = start(events=True)
    events = published(engine)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask(OTHER)
    assert any(isinstance(event, AllBlocksCleared) for event in events)


def test_nothing_is_published_where_nobody_listens(start: Start) -> None:
    engine = start()
    engine.ask(PROMPT)
    assert not engine.prefix.saves._events


# Pages that are gone


@dataclass
class Followed:
    """An engine that has announced the pages of PROMPT, what it published since, and the pool from outside."""

    engine: Engine
    events: list[Any]
    store: EmbeddedStore

    def removed(self) -> list[bytes]:
        """By one more request's steps."""
        self.engine.ask(OTHER[:8])
        return [key for event in self.events if isinstance(event, BlockRemoved) for key in event.block_hashes]

    def space(self, rank: int = 0) -> Space:
        return self.store.space(self.engine.prefix.namespace(), self.engine.prefix._views()[rank].shard)

    def put_others(self, count: int, nbytes: int, name: str = "others") -> int:
        """Pages of another model; returns how many were stored."""
        space = self.store.space(namespace(name), SHARD)
        keys = chain(name, count)
        return put_chain(space, keys, nbytes).count(Put.STORED)


@pytest.fixture
def follow(start: Start, pool: Path) -> Iterator[Callable[..., Followed]]:
    with ExitStack() as stack:

        def begin(**settings: Any) -> Followed:
            engine = start(events=True, **settings)
            engine.ask(PROMPT)
            events = published(engine)
            return Followed(engine, events, stack.enter_context(EmbeddedStore(pool)))

        yield begin


def test_pages_that_the_pool_evicted_are_said_to_be_removed(follow: Callable[..., Followed]) -> None:
    followed = follow()
    keys = page_keys(PROMPT, 16)
    assert followed.removed() == []
    assert all(followed.put_others(64, 65536, f"others {i}") for i in range(3)), "12 MiB in a pool of 8"
    assert followed.space().contains(keys) == [False] * 6
    assert sorted(followed.removed()) == sorted(keys)
    assert {event.medium for event in followed.events if isinstance(event, BlockRemoved)} == {"CPU"}
    followed.store.clear()
    assert sorted(followed.removed()) == sorted(keys), "each once"


def test_a_page_is_removed_once_one_rank_has_lost_its_shard(follow: Callable[..., Followed]) -> None:
    followed = follow(tp_size=2)
    keys = page_keys(PROMPT, 16)
    followed.space(rank=1).remove(keys[4:5])
    assert followed.removed() == keys[4:5]
    followed.space(rank=0).remove(keys[4:])
    assert followed.removed() == keys[4:]


def test_a_page_that_came_back_is_not_said_to_be_removed(follow: Callable[..., Followed]) -> None:
    followed = follow()
    keys = page_keys(PROMPT, 16)
    followed.space().remove(keys)
    put_chain(followed.space(), keys[:4], followed.engine.prefix._views()[0].nbytes)
    assert sorted(followed.removed()) == sorted(keys[4:])


def test_pages_of_others_are_not_said_to_be_removed(follow: Callable[..., Followed]) -> None:
    followed = follow()
    followed.put_others(4, 4096)
    followed.store.clear(namespace("others").digest)
    assert followed.removed() == []


def test_after_a_gap_what_was_announced_is_looked_at_again(
    follow: Callable[..., Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few pages a step."""
    monkeypatch.setattr(announced, "_LOOKS_A_STEP", 1)
    followed = follow()
    keys = page_keys(PROMPT, 16)
    position = followed.store.changes().position
    followed.space().remove(keys[3:])
    while not followed.store.changes(position).gap:
        followed.put_others(512, 64)  # half of what the pool's index has room for
        followed.store.clear(namespace("others").digest)
    gone: list[bytes] = []
    for _ in range(6):
        gone = followed.removed()
    assert sorted(gone) == sorted(keys[3:])


def test_a_page_that_is_gone_before_it_is_announced_is_taken_back_at_once(start: Start, pool: Path) -> None:
    engine = start(events=True, lazy=True)
    events = published(engine)
    take, keys = engine.prefix.saves.take_events, page_keys(PROMPT, 16)

    def take_late() -> list[Any]:
        with EmbeddedStore(pool) as store:
            store.clear()
        return take()

    engine.prefix.saves.take_events = take_late
    engine.ask(PROMPT)
    stored = [key for event in events if isinstance(event, BlockStored) for key in event.block_hashes]
    removed = [key for event in events if isinstance(event, BlockRemoved) for key in event.block_hashes]
    assert stored == keys and sorted(removed) == sorted(keys)


def test_after_a_reset_nothing_of_before_is_said_to_be_removed(follow: Callable[..., Followed]) -> None:
    followed = follow()
    followed.engine.scheduler.reset_prefix_cache(reset_connector=True)
    followed.engine.ask(OTHER[:8])
    followed.store.clear()
    assert followed.removed() == []


# On the wire


class Subscriber:
    """Of a publisher at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.publisher = ZmqEventPublisher(0, endpoint)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        tries = int(PATIENCE_S / 0.01)
        assert any(self._is_heard(number) for number in range(tries)), "the publisher does not hear of its subscriber"

    def _is_heard(self, number: int) -> bool:
        """A publisher says nothing to those of whom it has not heard yet."""
        self.publisher.publish(KVEventBatch(ts=-1.0 - number, events=[]))
        return bool(self._socket.poll(10))

    def receive(self, until: type) -> list[bytes]:
        """Payloads of the batches until one with an event of this class, that included."""
        payloads: list[bytes] = []
        while not any(isinstance(event, until) for payload in payloads[-1:] for event in decode(payload).events):
            assert self._socket.poll(int(PATIENCE_S * 1000)), "no batch came"
            _, _, payload = self._socket.recv_multipart()
            payloads.append(payload)
        return payloads

    def close(self) -> None:
        self._socket.close(linger=0)
        self.publisher.shutdown()


def decode(payload: bytes) -> KVEventBatch:
    return msgspec.msgpack.decode(payload, type=KVEventBatch)


@pytest.fixture
def subscriber(pool: Path) -> Iterator[Subscriber]:
    subscriber = Subscriber(f"ipc://{pool.parent}/events")
    yield subscriber
    subscriber.close()


def test_a_subscriber_reads_what_vllms_publisher_makes_of_our_events(start: Start, subscriber: Subscriber) -> None:
    """As vLLM's own classes, and as the maps that a program finds that has no vLLM."""
    engine = start(events=True)
    engine.scheduler.kv_event_publisher = subscriber.publisher
    engine.ask(PROMPT)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.ask(OTHER)
    payloads = subscriber.receive(until=AllBlocksCleared)

    events = [event for payload in payloads for event in decode(payload).events]
    stored = [event for event in events if isinstance(event, BlockStored) and event.medium == "CPU"]
    assert [key for event in stored for key in event.block_hashes] == page_keys(PROMPT, 16)
    assert all(getattr(event, "lookahead_token_ids", None) is None for event in stored)  # 0.33 has the field

    maps = [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]
    ours = [event for event in maps if event.get("medium") == "CPU"]
    assert [event["type"] for event in ours] == ["BlockStored"] * len(stored)
    assert [token for event in ours for token in event["token_ids"]] == PROMPT[:96]
    known = {"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
    assert all(set(event) == known for event in ours)
    assert {"type": "AllBlocksCleared"} in maps
