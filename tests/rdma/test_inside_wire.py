"""What a cable that loses, delays or breaks in mid-transfer costs: over real queue pairs and netem."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from rdma.wire import End, Wire
from simulated.storm import BATCHES, Storm

from transfer.control.handshake import Identity
from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, Buffer
from transfer.testing.process import make_transport
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Grant, Peer, Transport
from transfer.transports.memory import Memory
from transfer.transports.rdma import reader
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport

pytestmark = pytest.mark.inside


@pytest.fixture(scope="module")
def cable() -> Wire:
    return Wire()


@pytest.fixture
def wire(cable: Wire) -> Iterator[Wire]:
    yield cable
    cable.mend()


class OverWire(TransportFixtures):
    """The sender is at the near end. Its card answers, so what it sends is the data."""

    transport = RdmaTransport
    settings = RdmaSettings(lost_after_s=4.0)

    @pytest.fixture
    def sender(self, wire: Wire, memory: Memory) -> Iterator[Transport]:
        with self.at(wire.near, memory) as made:
            yield made

    @pytest.fixture
    def receiver(self, wire: Wire, there: Memory) -> Iterator[Transport]:
        with self.at(wire.far, there) as made:
            yield made

    def at(self, end: End, memory: Memory) -> Transport:
        settings = replace(self.settings, ports=[end.name])
        return make_transport(
            RdmaTransport, memory, Identity(b"sixteen bytes or more"), {"hosts": [end.address], "settings": settings}
        )


class TestBadWire(OverWire):
    @pytest.mark.parametrize("how", ["loss 1%", "loss 1% delay 5ms", "duplicate 5%", "corrupt 1%"])
    def test_all_arrives_over_it(self, wire: Wire, memory: Memory, there: Memory, peer: Peer, how: str) -> None:
        # A thousand packets: that none of them is lost is no chance worth a thought.
        source, target, grant = self.between(memory, there, 4 * MIB, seed=1)
        for end in (wire.near, wire.far):
            wire.harm(end, how)
        self.send(peer, grant, source, 4 * MIB)
        assert np.array_equal(target.bytes, source.bytes)
        assert wire.dropped(wire.near) or "loss" not in how

    def test_every_batch_of_a_storm_over_it_has_its_outcome_and_ok_means_that_the_bytes_are_there(
        self, wire: Wire
    ) -> None:
        def lose(*_: Any) -> None:
            for end in (wire.near, wire.far):
                wire.harm(end, "loss 1% duplicate 1%")

        storm = Storm(partial(self.at, wire.near), partial(self.at, wire.far), 3, lose)
        assert (storm.wrong, storm.still_sending) == ([], 0)
        assert storm.num_ok > BATCHES, "a storm in which little arrives shows little"
        assert wire.dropped(wire.near)


class TestTrafficClass(OverWire):
    settings = RdmaSettings(lost_after_s=4.0, traffic_class=104)

    @pytest.mark.parametrize("traffic_class", [0, 104])
    def test_every_packet_of_both_cards_has_it(
        self, request: pytest.FixtureRequest, wire: Wire, memory: Memory, there: Memory, traffic_class: int
    ) -> None:
        self.settings = replace(self.settings, traffic_class=traffic_class)
        peer = request.getfixturevalue("peer")
        source, target, grant = self.between(memory, there, 64 << 10, seed=6)
        with wire.packets(wire.near) as packets:
            self.send(peer, grant, source, 64 << 10)
        assert np.array_equal(target.bytes, source.bytes)
        assert set(packets) == {(wire.near.address, traffic_class), (wire.far.address, traffic_class)}


class TestCuts(OverWire):
    """In mid-transfer: the wire is slow, and little of it is on the way at a time."""

    SLOW = "rate 4mbit"
    NBYTES = 4 * MIB

    @pytest.fixture(autouse=True)
    def little(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = Card.__init__

        def open_small(card: Card, *arguments: Any) -> None:
            opened(card, *arguments)
            card.max_request_nbytes = 32 << 10

        monkeypatch.setattr(Card, "__init__", open_small)
        monkeypatch.setattr(reader, "WINDOW_NBYTES", 256 << 10)

    @pytest.mark.parametrize("break_it", [
        pytest.param(lambda wire: wire.set_down(wire.near), id="the sender's end down"),
        pytest.param(lambda wire: wire.set_down(wire.far), id="the receiver's end down"),
        pytest.param(lambda wire: wire.harm(wire.near, "loss 100%"), id="all data lost"),
        pytest.param(lambda wire: wire.harm(wire.far, "loss 100%"), id="all requests lost"),
    ])  # fmt: skip
    def test_a_wire_that_breaks_loses_the_peer_and_the_next_connection_works(
        self,
        wire: Wire,
        memory: Memory,
        there: Memory,
        sender: Transport,
        receiver: Transport,
        peer: Peer,
        break_it: Callable[[Wire], None],
    ) -> None:
        source, target, grant = self.between(memory, there, self.NBYTES, seed=2)
        wire.harm(wire.near, self.SLOW)
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        self.begun(target)
        break_it(wire)
        outcome = outcome_of(completion)
        assert outcome.cause is Cause.PEER_LOST and "no rail works any more" in outcome.detail
        assert not np.array_equal(target.bytes, source.bytes), "it was broken in mid-transfer"
        self.works_again(wire, there, sender, receiver, source, target, grant)

    def test_a_deadline_holds_on_a_wire_that_is_cut(
        self, wire: Wire, memory: Memory, there: Memory, sender: Transport, receiver: Transport, peer: Peer
    ) -> None:
        source, target, grant = self.between(memory, there, self.NBYTES, seed=3)
        wire.harm(wire.near, self.SLOW)
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=3.0)
        self.begun(target)
        wire.harm(wire.far, "loss 100%")
        assert outcome_of(completion).cause is Cause.DEADLINE
        self.works_again(wire, there, sender, receiver, source, target, grant)

    def test_a_short_interruption_costs_nothing_but_time(
        self, wire: Wire, memory: Memory, there: Memory, sender: Transport, peer: Peer
    ) -> None:
        source, target, grant = self.between(memory, there, self.NBYTES, seed=4)
        wire.harm(wire.near, self.SLOW)
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        self.begun(target)
        wire.harm(wire.far, "loss 100%")
        time.sleep(1.0)
        assert not completion.outcome
        wire.mend()
        assert outcome_of(completion).ok
        assert np.array_equal(target.bytes, source.bytes)
        assert "rail_failures" not in sender.take_counts()

    def begun(self, target: Buffer) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not target.bytes[::4096].any() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert target.bytes.any() and not target.bytes[-4096:].any()

    def works_again(
        self,
        wire: Wire,
        there: Memory,
        sender: Transport,
        receiver: Transport,
        source: Buffer,
        target: Buffer,
        grant: Grant,
    ) -> None:
        """Nothing of the old connection arrives once its grant was revoked, and all that a new one sends."""
        there.revoke(grant)
        target.bytes[:] = 7
        wire.mend()
        peer = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        assert (target.bytes == 7).all()
        again = there.grant(grant.addresses, grant.nbytes)
        self.send(peer, again, source, self.NBYTES)
        assert np.array_equal(target.bytes, source.bytes)
