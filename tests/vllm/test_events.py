"""KV events: what a router learns of the pool, and that it can read what the publisher of either vLLM makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from cases import PROMPT, Start, every_runner
from harness import PATIENCE_S, Engine
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch, ZmqEventPublisher

from mooncake_connector.kv.keys import page_keys

OTHER = list(range(200, 300))


def published(engine: Engine) -> list[Any]:
    events: list[Any] = []
    engine.scheduler.kv_event_publisher.publish = lambda batch: events.extend(
        event for event in batch.events if getattr(event, "medium", "CPU") == "CPU"
    )
    return events


@every_runner
def test_a_page_is_announced_when_every_worker_has_it(start: Start, faults, runner: dict[str, bool]) -> None:
    engine = start(**runner, tp_size=2, events=True)
    events = published(engine)
    faults.hold_writes()
    name = engine.add(PROMPT, name="r")
    engine.run(until=lambda: name in engine.reasons)
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
    assert not engine.half.saves._events


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
