"""One side of the protocol alone, and messages to it that a test can spoil.

`Producer` is "P0", `Consumer` is "D0"; the transfer is "t", its first grant number 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from simulated.ranks import SMALL

from transfer.plan.granularity import Divider, Granularity
from transfer.plan.layout import RankLayout, Table
from transfer.protocol.consumer import Consumer
from transfer.protocol.incoming import Incoming, Source
from transfer.protocol.messages import Announce, AnyMessage, Close, Granted, Introduction, Landed, Report, State, Status
from transfer.protocol.orders import Ended, Ending, Protocol, Send, Timing
from transfer.protocol.outgoing import Outgoing
from transfer.protocol.producer import Divide, Producer
from transfer.transports.base import TransferError

KEY = b"k" * 16
LAYERS = range(2)
SMALL_RANK = RankLayout((SMALL,))


def divide(peer: str, granted: Granted) -> list[Divider]:
    if peer == "stranger":
        raise TransferError("blocks of 3 tokens here, of 4 there")
    return [Divider(Granularity.LAYER, LAYERS, granted.tables[0].tokens, 4)]


def name_of(request: str) -> str:
    """What both sides call the transfer of a request; "t" and "t/2" have one name."""
    return request.partition("/")[0]


Prompt: TypeAlias = Callable[[str], bytes]
"""The digest of a request's prompt."""


def no_prompt(request: str) -> bytes:
    return b""


def own_prompt(request: str) -> bytes:
    """One that no other request has."""
    return hashlib.sha256(request.encode()).digest()


class NamedProducer(Producer):
    """Told of transfers by request: each is one record, from its opening on."""

    def __init__(self, divide: Divide = divide, timing: Timing | None = None, prompt: Prompt = no_prompt) -> None:
        super().__init__(divide, timing, names_return=True)
        self._prompt = prompt
        self.records: dict[str, Outgoing] = {}

    def open(self, transfer: str, now_s: float) -> None:
        self.records[transfer] = Outgoing(name_of(transfer), transfer, self._prompt(transfer))
        super().open(self.records[transfer], now_s)

    def computed(self, transfer: str, layer: int, stop_token: int, now_s: float, *, run: int | None = None) -> None:
        record = self.records[transfer]
        super().computed(record, layer, stop_token, now_s, run=record.run if run is None else run)

    def finished(self, transfer: str, num_tokens: int, now_s: float) -> None:
        super().finished(self.records[transfer], num_tokens, now_s)

    def preempted(self, transfer: str, now_s: float) -> None:
        super().preempted(self.records[transfer], now_s)

    def cancel(self, transfer: str, cause: str, now_s: float) -> None:
        super().cancel(self.records[transfer], cause, now_s)

    @property
    def held(self) -> list[str]:
        return [record.request for record in self._transfers.values() if record.opened and not record.is_over]

    def written(self, peer: str, transfer: str, *args: Any) -> None:
        super().written(peer, self.records[transfer], *args)


class NamedConsumer(Consumer):
    """Told of transfers by request, and of their sources with it."""

    def __init__(self, timing: Timing | None = None, prompt: Prompt = no_prompt) -> None:
        super().__init__(timing)
        self._prompt = prompt
        self.records: dict[str, Incoming] = {}

    def announce(self, transfer: str, sources: Sequence[Source], now_s: float, *, computed: bool) -> None:
        record = Incoming(name_of(transfer), transfer, self._prompt(transfer), computed=computed)
        self.records[transfer] = record
        super().announce(record, now_s)
        super().found(record, sources, now_s)

    def grant(self, transfer: str, first: int, stop: int, block_ids: list[int], key: bytes, now_s: float) -> bool:
        return super().grant(self.records[transfer], [Table(first, stop, block_ids)], key, now_s)

    def cancel(self, transfer: str, cause: str, now_s: float) -> None:
        super().cancel(self.records[transfer], cause, now_s)

    @property
    def held(self) -> list[str]:
        return [record.request for record in self._transfers.values() if not record.is_over]

    def verified(self, peer: str, transfer: str, *args: Any) -> None:
        super().verified(peer, self.records[transfer], *args)

    def revoked(self, transfer: str, now_s: float) -> None:
        super().revoked(self.records[transfer], now_s)


def make_producer() -> NamedProducer:
    return NamedProducer()


def open_producer(*peers: str) -> NamedProducer:
    """Whose engine has begun to compute the transfer, which these peers wait for."""
    producer = NamedProducer()
    producer.open("t", 0.0)
    for peer in peers:
        producer.receive(peer, granted(destinations=len(peers)), 0.0)
    return producer


def make_consumer(sources: int = 1, *, has_grant: bool = True, prompt: bytes = b"") -> NamedConsumer:
    consumer = NamedConsumer(prompt=lambda _: prompt)
    consumer.announce("t", [Source(f"P{n}", [LAYERS], 1) for n in range(sources)], 0.0, computed=True)
    if has_grant:
        assert consumer.grant("t", 0, 8, [5], KEY, 0.0)
    consumer.take()
    return consumer


def cancelled_consumer() -> NamedConsumer:
    """Which has given its blocks back, and the producer does not know yet."""
    consumer = make_consumer()
    consumer.cancel("t", "client gone", 1.0)
    consumer.revoked("t", 1.0)
    consumer.take()
    return consumer


def land(consumer: NamedConsumer, part: Landed | None = None, peer: str = "P0", *, right: bool = True) -> None:
    """A batch arrives and is checked."""
    part = part or landed()
    consumer.receive(peer, part, 1.0)
    consumer.verified(peer, "t", part, right, 1.0)


def announce(**changes: object) -> Announce:
    fields = {"transfer": "t", "number": 1, "destinations": 1, "computed": False}
    return Announce(**{**fields, **changes})


def granted(**changes: object) -> Granted:
    table = {"first_token": 0, "stop_token": 8, "block_ids": [5]}
    table = {name: changes.pop(name, value) for name, value in table.items()}
    fields = {"transfer": "t", "number": 1, "destinations": 1, "computed": False, "key": KEY}
    return Granted(**{**fields, "tables": [Table(**table)], **changes})


def report(**changes: object) -> Report:
    return Report(**{"transfer": "t", "number": 1, "verified": 0, "again": [], **changes})


def close(**changes: object) -> Close:
    fields = {"transfer": "t", "number": 1, "destinations": 1, "done": True, "cause": ""}
    return Close(**{**fields, **changes})


def landed(**changes: object) -> Landed:
    fields = {"transfer": "t", "number": 1, "batch": 0, "attempt": 0, "checksums": [1]}
    return Landed(**{**fields, "first_layer": 0, "num_layers": 2, "first_token": 0, "stop_token": 8, **changes})


def status(**changes: object) -> Status:
    fields = {"transfer": "t", "number": 1, "state": State.OPEN, "has_grant": True, "cause": ""}
    return Status(**{**fields, **changes})


def introduction(layout: RankLayout = SMALL_RANK, **changes: object) -> Introduction:
    fields = {"parts": [section.shard for section in layout.sections], "endpoints": {"tcp": b"127.0.0.1:1"}}
    return Introduction(layout=layout, **{**fields, **changes})


def answers(side: Protocol, message: AnyMessage, peer: str = "D0") -> list[AnyMessage]:
    side.take()
    side.receive(peer, message, 1.0)
    return [order.message for order in side.take() if isinstance(order, Send)]


def orders(side: Protocol, *kinds: type) -> list:
    return [order for order in side.take() if isinstance(order, kinds)]


def ended(side: Protocol) -> list[tuple[str, Ending, str]]:
    """Name, ending and cause of what is over."""
    return [(over.transfer.name, over.transfer.ending, over.transfer.cause) for over in orders(side, Ended)]
