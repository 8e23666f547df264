"""All parts of `transfer/` together: ranks with real memory, the protocol, plans, checksums and a real transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from simulated.ranks import SPAN, Instance, Model, heads_of, make_rank
from simulated.sides import NamedConsumer, NamedProducer

from transfer.integrity import page_checksums, wrong_pages
from transfer.plan.granularity import Granularity
from transfer.plan.layout import RankLayout, Section
from transfer.plan.pairing import Pairing, Route, routes
from transfer.protocol.consumer import Source
from transfer.protocol.messages import Granted, decode, encode
from transfer.protocol.orders import Ended, Ending, Order, Protocol, Revoke, Send, Verify, Write
from transfer.protocol.producer import Shape
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Grant, Transport
from transfer.transports.cma import CmaTransport
from transfer.transports.memory import Memory
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport

MODEL = Model(layers=4, heads=4, k_dim=8, v_dim=8, itemsize=2)
TOKENS, PAGE = 44, 16
CHUNKS = (20, TOKENS)
Bytes = np.ndarray


class Rank:
    """One process's worth: memory, a transport, and its side of the protocol."""

    def __init__(
        self, name: str, section: Section, table: list[int], side: Protocol, transport: type[Transport]
    ) -> None:
        self.name, self.table, self.side = name, table, side
        self.bytes: Bytes = np.zeros(SPAN, dtype=np.uint8)
        address = self.bytes.ctypes.data
        moved = tuple(start + address for start in section.blocks.layer_addresses)
        self.layout = replace(section, blocks=replace(section.blocks, layer_addresses=moved))
        self.memory = Memory()
        self.memory.register(address, SPAN)
        self.transport = transport(self.memory)
        self.endpoint = self.transport.listen()
        self.grant: Grant | None = None
        self.ending: Ending | None = None


class Pair:
    """A prefill and a decode instance, and one request that both have."""

    def __init__(
        self, transport: type[Transport], source_tp: int, destination_tp: int, granularity: Granularity
    ) -> None:
        self.granularity = granularity
        self.spoil: Callable[[Rank], None] | None = None
        self.producers = [
            Rank(f"P{n}", layout, [7, 2, 9, 4, 1, 0], NamedProducer(self._shape(n)), transport)
            for n, layout in enumerate(ranks_of(source_tp, 8, "LBHN"))
        ]
        self.consumers = [
            Rank(f"D{n}", layout, [3, 0, 5, 1], NamedConsumer(), transport)
            for n, layout in enumerate(ranks_of(destination_tp, 12, "BLHN"))
        ]
        self.ranks = {rank.name: rank for rank in (*self.producers, *self.consumers)}
        self.routes = routes(
            [RankLayout((rank.layout,)) for rank in self.producers],
            [RankLayout((rank.layout,)) for rank in self.consumers],
        )
        self.pairings = {
            (f"P{route.source}", f"D{route.destination}"): self._pairing(route)
            for route in self.routes
            if any(route.parts)
        }
        self.peers = {
            pair: self.ranks[pair[0]].transport.connect(self.ranks[pair[1]].endpoint, deadline_s=10.0)
            for pair in self.pairings
        }

    def _pairing(self, route: Route) -> Pairing:
        (part,) = route.parts
        assert part is not None
        return Pairing(self.producers[route.source].layout, self.consumers[route.destination].layout, part)

    def _shape(self, number: int) -> Callable[[str, Granted], Shape]:
        def shape(peer: str, granted: Granted) -> Shape:
            pairing = self.pairings[f"P{number}", peer]
            return Shape(self.granularity, pairing.layers, pairing.unit)

        return shape

    def announce(self) -> None:
        for number, rank in enumerate(self.consumers):
            mine = [route for route in self.routes if route.destination == number]
            sources = [
                Source(
                    f"P{route.source}",
                    [part.layers if part else range(0) for part in route.parts],
                    sum(other.source == route.source for other in self.routes),
                )
                for route in mine
            ]
            assert isinstance(rank.side, NamedConsumer)
            rank.side.announce("t", sources, now_s(), computed=False)
            rank.grant = rank.memory.grant(*rank.layout.ranges(rank.table))
            rank.side.grant("t", 0, TOKENS, rank.table, rank.grant.key, now_s())

    def compute(self) -> None:
        """Prefill, chunk by chunk and layer by layer, while the transfer runs."""
        for rank in self.producers:
            assert isinstance(rank.side, NamedProducer)
            rank.side.open("t", now_s())
        for stop in CHUNKS:
            for layer in range(MODEL.layers):
                for rank in self.producers:
                    assert isinstance(rank.side, NamedProducer)
                    rank.side.computed("t", layer, stop, now_s())
                self.work()
        for rank in self.producers:
            assert isinstance(rank.side, NamedProducer)
            rank.side.finished("t", TOKENS, now_s())

    def finish(self) -> dict[str, Ending | None]:
        limit_s = time.monotonic() + 20.0
        while any(rank.ending is None for rank in self.ranks.values()) and time.monotonic() < limit_s:
            self.work()
        return {name: rank.ending for name, rank in self.ranks.items()}

    def work(self) -> None:
        """Carry out orders until there are none."""
        while found := [(rank, order) for rank in self.ranks.values() for order in rank.side.take()]:
            for rank, order in found:
                self._carry_out(rank, order)
        for rank in self.ranks.values():
            rank.side.tick(now_s())

    def _carry_out(self, rank: Rank, order: Order) -> None:
        if isinstance(order, Send):
            self.ranks[order.peer].side.receive(rank.name, decode(encode(order.message)), now_s())
        elif isinstance(order, Write):
            self._write(rank, order)
        elif isinstance(order, Verify):
            landed, pairing = order.landed, self.pairings[order.peer, rank.name]
            layers = range(landed.first_layer, landed.first_layer + landed.num_layers)
            if self.spoil is not None:
                self.spoil(rank)
            pages = pairing.destination_pages(layers, landed.first_token, landed.stop_token, rank.table, PAGE)
            assert isinstance(rank.side, NamedConsumer)
            rank.side.verified(order.peer, "t", landed, not wrong_pages(pages, landed.checksums), now_s())
        elif isinstance(order, Revoke):
            assert rank.grant is not None and isinstance(rank.side, NamedConsumer)
            rank.memory.revoke(rank.grant)
            rank.side.revoked("t", now_s())
        elif isinstance(order, Ended):
            rank.ending = order.transfer.ending

    def _write(self, rank: Rank, order: Write) -> None:
        batch, pairing = order.batch, self.pairings[rank.name, order.peer]
        layers = range(batch.first_layer, batch.first_layer + batch.num_layers)
        part = (layers, batch.first_token, batch.stop_token, rank.table)
        copies = pairing.copies(*part, order.granted.tables[0].block_ids)
        grant = Grant(order.granted.key, *self.ranks[order.peer].layout.ranges(order.granted.tables[0].block_ids))
        peer = self.peers[rank.name, order.peer]
        done = outcome_of(peer.write(grant, copies.source, copies.destination, copies.nbytes, deadline_s=10.0))
        checksums = page_checksums(pairing.source_pages(*part, PAGE))
        assert isinstance(rank.side, NamedProducer)
        rank.side.written(order.peer, "t", order.number, checksums, None if done.ok else str(done), now_s())

    def fill(self) -> None:
        """Every byte of the request at the producers says what it is."""
        for rank in self.producers:
            names, places = instance(rank).bytes_of(rank.layout)
            rank.bytes[places - rank.bytes.ctypes.data] = value(names)

    def check(self) -> None:
        for rank in self.consumers:
            names, places = instance(rank).bytes_of(rank.layout, TOKENS)
            assert (rank.bytes[places - rank.bytes.ctypes.data] == value(names)).all()
            assert rank.bytes.astype(bool).sum() <= len(places)

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.transport.close()


def ranks_of(tp: int, block_tokens: int, order: str) -> list[Section]:
    return [
        make_rank(MODEL, range(MODEL.layers), heads_of(MODEL, rank, tp), block_tokens, 10, order, 0, 0)
        for rank in range(tp)
    ]


def instance(rank: Rank) -> Instance:
    return Instance(MODEL, [rank.layout], rank.table)


def value(names: np.ndarray) -> np.ndarray:
    """A byte for each name, never 0."""
    return (names * 2654435761 >> 7) % 255 + 1


def now_s() -> float:
    return time.monotonic()


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("transport", [CmaTransport, ShmTransport, TcpTransport])
@pytest.mark.parametrize("source_tp, destination_tp", [(2, 1), (1, 2), (8, 2)])
def test_kv_arrives_whole_between_instances_of_other_tp_block_size_and_order(
    source_tp, destination_tp, transport, granularity
):
    pair = Pair(transport, source_tp, destination_tp, granularity)
    pair.fill()
    pair.announce()
    pair.compute()
    assert set(pair.finish().values()) == {Ending.DONE}
    pair.check()
    pair.close()


def test_a_batch_that_is_spoilt_on_its_way_comes_again():
    pair = Pair(ShmTransport, 2, 1, Granularity.CHUNK)
    pair.fill()
    pair.announce()
    spoilt = []

    def spoil(rank: Rank) -> None:
        if not spoilt:
            _, places = instance(rank).bytes_of(rank.layout, 4)
            rank.bytes[places - rank.bytes.ctypes.data] ^= 1
            spoilt.append(rank)

    pair.spoil = spoil
    pair.compute()
    assert set(pair.finish().values()) == {Ending.DONE}
    assert spoilt
    pair.check()
    pair.close()


def test_nothing_is_written_after_the_consumer_gave_up():
    pair = Pair(ShmTransport, 1, 1, Granularity.FULL)
    pair.fill()
    pair.announce()
    pair.work()
    (rank,) = pair.consumers
    assert isinstance(rank.side, NamedConsumer) and rank.grant is not None
    rank.memory.revoke(rank.grant)  # before any message says so
    pair.compute()
    assert pair.finish() == {"P0": Ending.FAILED, "D0": Ending.FAILED}
    assert not rank.bytes.any()
    pair.close()
