"""What the card refuses, what a revoked grant ends, and what a broken queue pair costs: over real queue pairs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rdma.test_inside import EMULATED

from transfer.control.handshake import Identity
from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Peer, Transport, TransportOptions, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.rdma.abi import Opcode
from transfer.transports.rdma.card import Card
from transfer.transports.rdma.keys import Keys
from transfer.transports.rdma.opened import open_cards
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.reader import Reader
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.rdma.work import Read
from transfer.transports.registry import make_transports

pytestmark = pytest.mark.inside


class TestRefusals(TransportFixtures):
    """Of keys of regions. Over one rail: with another one they would break both, one after the other."""

    transport = RdmaTransport

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"settings": RdmaSettings(no_windows="keys of regions"), **EMULATED}

    @pytest.fixture(autouse=True)
    def one_rail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transfer.transports.rdma.rails.MAX_RAILS", 1)

    def told(self, peer: Peer, monkeypatch: pytest.MonkeyPatch, wrong: Keys) -> None:
        """Have the peer's next orders carry these keys."""
        encoder = peer._encoder  # type: ignore[attr-defined]
        monkeypatch.setattr(encoder, "keys", lambda card, pieces: wrong.encode(pieces.local))

    @pytest.mark.parametrize("whose", ["stale", "foreign", "invented"])
    def test_the_card_refuses_a_key_that_is_not_valid_and_the_connection_goes_on(
        self, memory: Memory, there: Memory, sender: Transport, peer: Peer, monkeypatch: pytest.MonkeyPatch, whose: str
    ) -> None:
        source, target, grant = self.between(memory, there, 8192, seed=1)
        assert isinstance(sender, RdmaTransport)
        _, keys = sender._rails.all[0].card.keys()
        if whose == "stale":
            memory.unregister(*memory.regions)
            memory.register(source.address, 8192)
            assert sender._rails.all[0].card.keys()[1].keys.tolist() != keys.keys.tolist(), "it has another key now"
        elif whose == "foreign":  # of another protection domain, as of an engine beside this one
            other = Memory()
            other.register(source.address, 8192)
            with self.make(other) as stranger:
                assert isinstance(stranger, RdmaTransport)
                keys = stranger._rails.all[0].card.keys()[1]
                self.refused(peer, grant, source, target, monkeypatch, keys)
            keys = replace(keys)
        else:
            keys = replace(keys, keys=keys.keys ^ 0xFF)
        self.refused(peer, grant, source, target, monkeypatch, keys)
        self.send(peer, grant, source, 8192)
        assert np.array_equal(target.bytes, source.bytes)

    def refused(self, peer: Any, grant: Any, source: Any, target: Any, patch: pytest.MonkeyPatch, keys: Keys) -> None:
        with patch.context() as patched:
            self.told(peer, patched, keys)
            outcome = outcome_of(peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S))
        assert outcome.cause is Cause.SOURCE and "broke" in outcome.detail
        assert not target.bytes.any() and peer.alive

    @pytest.mark.parametrize("opcode", ["RDMA_WRITE", "RDMA_READ"])
    def test_a_peer_that_knows_the_key_of_what_was_granted_to_it_neither_writes_nor_reads_it(
        self, memory: Memory, there: Memory, sender: Any, receiver: Any, peer: Any, opcode: str
    ) -> None:
        """It asks over its end of the queue pair, which ours never does, and the key is the right one."""
        source, target, grant = self.between(memory, there, 4096, seed=6)
        target.bytes[:], kept = 7, source.bytes.copy()
        key = receiver._rails.all[0].card.keys()[1].key_of(target.address, 4096)
        own = sender._rails.all[0].card.keys()[0].key_of(source.address, 4096)
        there.revoke(grant)
        (pair,), (queue,) = peer._encoder._pairs, peer._encoder._queues
        chain = Chain(1, 1)
        chain.read(1, Read(target.address, key, 4096, [(source.address, 4096, own)]))
        chain.requests["opcode"] = Opcode[opcode]
        pair.post(chain)
        deadline = time.monotonic() + DEADLINE_S
        while not (found := queue.poll(1)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "remote" in found[0].status_str.lower(), found[0].status_str
        assert (target.bytes == 7).all() and np.array_equal(source.bytes, kept)
        self.send(peer, there.grant(grant.addresses, grant.nbytes), source, 4096)
        assert np.array_equal(target.bytes, source.bytes)

    def test_a_grant_whose_reads_get_no_answer_ends_with_the_queue_pair(
        self, memory: Memory, there: Memory, peer: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The other card forgets its queue pair, so it answers no read, as one behind a cut cable."""
        source, target, grant = self.between(memory, there, 4 * MIB, seed=2)
        for pair in peer._encoder._pairs:
            pair.close()
        completion = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while not there.granted(grant.key)._holders and time.monotonic() < deadline:
            time.sleep(0.01)
        with caplog.at_level(logging.WARNING):
            there.revoke(grant)
        assert "nobody wanted it any more" in caplog.text or "retry" in caplog.text
        target.bytes[:] = 7
        assert outcome_of(completion).cause in (Cause.SOURCE, Cause.PEER_LOST)
        assert (target.bytes == 7).all()

    def test_orders_of_several_writes_fail_together_and_those_after_them_arrive(
        self, memory: Memory, there: Memory, sender: Any, peer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, target, grant = self.between(memory, there, 2 * MIB, seed=3)
        _, keys = sender._rails.all[0].card.keys()
        with monkeypatch.context() as patched:
            self.told(peer, patched, replace(keys, keys=keys.keys ^ 0xFF))
            writes = [peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S) for _ in range(8)]
            assert {outcome_of(write).cause for write in writes} == {Cause.SOURCE}
        for _ in range(3):
            self.send(peer, grant, source, 2 * MIB)
        assert np.array_equal(target.bytes, source.bytes)


class TestLimits(TransportFixtures):
    """Of a card that can do little."""

    transport = RdmaTransport
    most: int

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return EMULATED

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        opened, posted, self.most = Card.__init__, Reader._post, 0

        def open_small(card: Card, *arguments: Any) -> None:
            opened(card, *arguments)
            card.max_requests, card.max_ranges, card.max_reads, card.max_request_nbytes = 3, 2, 1, 4096

        def post(reader: Reader) -> None:
            posted(reader)
            self.most = max(self.most, sum(batch.requests for batch in reader._batches))
            assert reader._room >= 0

        monkeypatch.setattr(Card, "__init__", open_small)
        monkeypatch.setattr(Reader, "_post", post)
        yield

    def test_its_limits_are_kept_and_all_bytes_arrive(self, memory: Memory, there: Memory, peer: Peer) -> None:
        count = 100
        source, target, grant = self.between(memory, there, count * 8192, seed=4)
        places = np.arange(count) * 8192
        sizes = np.full(count, 5000)
        write = peer.write(grant, source.address + places, target.address + places, sizes, deadline_s=DEADLINE_S)
        assert outcome_of(write).ok
        arrived, sent = (buffer.bytes.reshape(count, 8192) for buffer in (target, source))
        assert np.array_equal(arrived[:, :5000], sent[:, :5000]) and not arrived[:, 5000:].any()
        assert self.most == 3


def test_a_card_that_there_is_not_is_named_with_those_there_are() -> None:
    with pytest.raises(Unavailable, match=r"no port of mlx5_0 is up .*: rxe0 port 1 up, rxe1 port 1 up"):
        RdmaTransport(Memory(), settings=RdmaSettings(ports=["mlx5_0"]))


def test_the_first_card_is_that_of_the_address_that_peers_know() -> None:
    for number in (0, 1):
        cards = open_cards([f"10.77.{number}.1"], RdmaSettings())
        assert [card.rail.name for card in cards] == [f"rxe{number}:1", f"rxe{1 - number}:1"]
        assert cards[0].rail.address == f"10.77.{number}.1"
        for card in cards:
            card.close()


def test_auto_goes_over_the_cards_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    options = TransportOptions(Identity(b"sixteen bytes or more"), hosts=["10.77.0.1"])
    with (
        make_transports(["auto"], Memory(), options) as here,
        make_transports(["auto"], Memory(), options) as there,
    ):
        endpoints = there.listen()
        monkeypatch.setattr("transfer.transports.local.boot_id", lambda: "another boot")
        assert here.connect(endpoints, deadline_s=DEADLINE_S).transport == "rdma"


def test_memory_that_cannot_be_locked_leaves_it_out_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    memory.register(1 << 40, 4096)  # nothing is mapped there
    with make_transports(["rdma"], memory, TransportOptions(Identity())) as made:
        assert made.listen() == {}
    assert "transport rdma is left out: it cannot use the 4096 bytes at 0x10000000000" in caplog.text
    assert "ulimit -l unlimited" in caplog.text
