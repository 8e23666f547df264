"""One half of the protocol alone, and messages to it that a test can spoil.

`Producer` is life 10 of "P0", `Consumer` life 20 of "D0"; the transfer is "t", its first grant number 1.
"""

from __future__ import annotations

from simulated.ranks import Model, make_rank

from transfer.plan.granularity import Granularity
from transfer.protocol.consumer import Consumer, Source
from transfer.protocol.messages import Announce, AnyMessage, Close, Granted, Introduction, Landed, Report, State, Status
from transfer.protocol.orders import Half, Send
from transfer.protocol.producer import Producer, Shape
from transfer.transports.base import TransferError

KEY = b"k" * 16
LAYERS = range(2)


def shape(peer: str, granted: Granted) -> Shape:
    if peer == "stranger":
        raise TransferError("blocks of 3 tokens here, of 4 there")
    return Shape(Granularity.LAYER, LAYERS, 4)


def make_producer() -> Producer:
    return Producer(10, shape)


def make_consumer(legs: int = 1) -> Consumer:
    consumer = Consumer(20)
    consumer.announce("t", [Source(f"P{n}", 10, LAYERS, 1) for n in range(legs)], 0.0, computed=True)
    assert consumer.grant("t", 0, 8, [5], KEY, 0.0)
    consumer.take()
    return consumer


def announce(**changes: object) -> Announce:
    fields = {"generation": 20, "to": 10, "transfer": "t", "grant": 0, "legs": 1, "computed": False}
    return Announce(**{**fields, **changes})


def granted(**changes: object) -> Granted:
    fields = {"generation": 20, "to": 10, "transfer": "t", "grant": 1, "legs": 1, "computed": False}
    return Granted(**{**fields, "first_token": 0, "stop_token": 8, "block_ids": [5], "key": KEY, **changes})


def report(**changes: object) -> Report:
    return Report(**{"generation": 20, "to": 10, "transfer": "t", "grant": 1, "verified": 0, "again": [], **changes})


def close(**changes: object) -> Close:
    fields = {"generation": 20, "to": 10, "transfer": "t", "grant": 1, "legs": 1, "done": True, "cause": ""}
    return Close(**{**fields, **changes})


def landed(**changes: object) -> Landed:
    fields = {"generation": 10, "to": 20, "transfer": "t", "grant": 1, "batch": 0, "attempt": 0, "checksums": [1]}
    return Landed(**{**fields, "first_layer": 0, "num_layers": 2, "first_token": 0, "stop_token": 8, **changes})


def status(**changes: object) -> Status:
    fields = {"generation": 10, "to": 20, "transfer": "t", "grant": 1, "state": State.OPEN, "cause": ""}
    return Status(**{**fields, **changes})


def introduction(**changes: object) -> Introduction:
    layout = make_rank(Model(2, 2, 2, 2, 2), range(2), range(2), 4, 4, "LBHN", 0, 0)
    fields = {"generation": 20, "to": 0, "transfer": "", "layout": layout, "part": layout.shard}
    return Introduction(**{**fields, "endpoints": {"tcp": b"127.0.0.1:1"}, **changes})


def answers(half: Half, message: AnyMessage, peer: str = "D0") -> list[AnyMessage]:
    half.take()
    half.receive(peer, message, 1.0)
    return [order.message for order in half.take() if isinstance(order, Send)]


def orders(half: Half, *kinds: type) -> list:
    return [order for order in half.take() if isinstance(order, kinds)]
