"""Fetches that end when the test lets them: who waits for them, and who does not."""

import threading

import numpy as np
import pytest
from simulated.waiting import wait_for

from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports import cma, memory, receiver
from transfer.transports.base import Cause, Outcome, TransferError
from transfer.transports.local import LocalTransport
from transfer.transports.memory import Memory
from transfer.transports.network import NetworkTransport
from transfer.transports.pull import Fetcher, PullEncoder, PullTransport
from transfer.transports.vectors import copy_in
from transfer.transports.wire import CopyStatus

PIECE = 1000


class Gate(Fetcher):
    """Copies within this process, when it is told to."""

    def __init__(self, log):
        self.log, self.fetches = log, []

    def start(self, fetch):
        self.fetches.append(fetch)
        self.log.append("start")

    def cancel(self, fetch):
        self.log.append("cancel")

    def close(self):
        self.log.append("close")

    def end(self, number=0, status=CopyStatus.OK):
        fetch = self.fetches.pop(number)
        if status is CopyStatus.OK:
            copy_in(fetch.pieces.remote[0], fetch.pieces.local, fetch.pieces.nbytes)
        fetch.done(status)


class _Gated(PullTransport):
    name = "gated"
    max_nbytes = MIB
    kind = Gate

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gates, self.log = [], []

    def _fetcher(self, connection):
        self.gates.append(self.kind(self.log))
        return self.gates[-1]

    def _prepare(self, connection, deadline_at):
        return PullEncoder(self.max_nbytes)


class Gated(_Gated, LocalTransport):
    pass


class FarGated(_Gated, NetworkTransport):
    pass


class Pair:
    """A receiver and the peers that two senders have of it."""

    def __init__(self, stack, kind=Gated, nbytes=16 * PIECE, **options):
        self.there, here = Memory(), Memory()
        self.source, self.target = Buffer(nbytes, seed=1), Buffer(nbytes)
        here.register(self.source.address, nbytes)
        self.there.register(self.target.address, nbytes)
        self.grant = self.there.grant(int64(self.target.address), int64(nbytes))
        self.receiver = stack.enter_context(kind(self.there, **options))
        endpoint = self.receiver.listen()
        self.peers = [stack.enter_context(kind(here, **options)).connect(endpoint, deadline_s=30) for _ in range(2)]

    def write(self, number=0, peer=0, nbytes=PIECE, grant=None):
        place = int64(number * nbytes)
        return self.peers[peer].write(
            grant or self.grant, self.source.address + place, self.target.address + place, int64(nbytes), deadline_s=60
        )

    def gate(self, fetches=1, peer=0):
        """That of a peer, once it has so many fetches; each has been given one before."""
        wait_for(lambda: len(self.receiver.gates) > peer and len(self.receiver.gates[peer].fetches) >= fetches)
        return self.receiver.gates[peer]

    def arrived(self, number):
        part = slice(number * PIECE, (number + 1) * PIECE)
        return bool((self.target.bytes[part] == self.source.bytes[part]).all())

    def revoke(self):
        """In a thread; an event that is set when it has returned, and what it raised."""
        returned, raised = threading.Event(), []

        def run():
            try:
                self.there.revoke(self.grant)
            except TransferError as error:
                raised.append(error)
            returned.set()

        threading.Thread(target=run, daemon=True).start()
        wait_for(lambda: self.there.granted(self.grant.key) is None or self.there.granted(self.grant.key).revoked)
        return returned, raised


@pytest.fixture
def pair(stack, monkeypatch):
    monkeypatch.setattr(receiver, "LEAVE_S", 0.2)  # for what the tests leave under way
    return Pair(stack)


def test_orders_of_a_peer_are_under_way_together_and_end_in_any_order(pair):
    told = []
    for number in range(4):
        pair.write(number).add_done_callback(lambda outcome, number=number: told.append((number, outcome)))
    gate = pair.gate(fetches=4)
    assert not told and not pair.target.bytes.any()
    for number, left in ((2, [0, 1, 3]), (0, [1, 3]), (1, [1]), (0, [])):
        gate.end(number)
        wait_for(lambda left=left: len(told) == 4 - len(left))
        assert [n for n in range(4) if not pair.arrived(n)] == left
    assert told == [(number, Outcome()) for number in (2, 0, 3, 1)]


def test_a_fetch_that_fails_is_an_outcome_and_the_next_one_arrives(pair):
    failing, fine = pair.write(0), pair.write(1)
    gate = pair.gate(fetches=2)
    gate.end(status=CopyStatus.UNREADABLE)
    gate.end()
    assert outcome_of(failing).cause is Cause.SOURCE and outcome_of(fine).ok and pair.arrived(1)


def test_a_slow_fetch_holds_up_no_other_peer(pair):
    slow, quick = pair.write(0), None
    pair.gate(peer=0)
    quick = pair.write(1, peer=1)
    pair.gate(peer=1).end()
    assert outcome_of(quick).ok and slow.outcome is None
    pair.gate(peer=0).end()
    assert outcome_of(slow).ok


def test_what_a_peer_asks_beyond_a_number_waits_on_its_side(pair, monkeypatch):
    monkeypatch.setattr(Gate, "max_under_way", 2)
    writes = [pair.write(number) for number in range(5)]
    for done in range(5):
        gate = pair.gate(fetches=min(2, 5 - done))
        assert len(gate.fetches) == min(2, 5 - done)
        gate.end()
    assert all(outcome_of(write).ok for write in writes) and pair.receiver.log.count("start") == 5


def test_a_grant_ends_after_the_fetches_that_hold_it(pair):
    writes = [pair.write(number) for number in range(2)]
    gate = pair.gate(fetches=2)
    returned, _ = pair.revoke()
    wait_for(lambda: pair.receiver.log.count("cancel") == 2)
    gate.end()
    assert not returned.wait(0.05)
    assert outcome_of(pair.write(3)).cause is Cause.REFUSED, "no other one begins"
    gate.end(status=CopyStatus.NO_GRANT)
    assert returned.wait(60) and pair.there.granted(pair.grant.key) is None
    assert [outcome_of(write).cause for write in writes] == [None, Cause.REFUSED]
    second = pair.there.grant(pair.grant.addresses, pair.grant.nbytes)
    again = pair.write(5, grant=second)
    pair.gate().end()
    assert outcome_of(again).ok, "the connection goes on"


def test_a_fetch_that_does_not_end_with_its_grant_is_cut_off_and_costs_its_peer(pair, monkeypatch, caplog):
    monkeypatch.setattr(memory, "CANCEL_S", 0.2)
    deaf, other = pair.write(0), pair.write(1, peer=1)
    pair.gate(peer=0), pair.gate(peer=1)
    there = pair.there.grant(int64(pair.target.address + 8 * PIECE), int64(PIECE))
    kept = pair.write(8, peer=1, grant=there)
    pair.gate(fetches=2, peer=1).end()
    assert outcome_of(other).ok
    returned, raised = pair.revoke()
    assert returned.wait(60) and not raised
    assert pair.receiver.log.count("close") == 1
    wait_for(lambda: "did not end when its grant did" in caplog.text)
    assert outcome_of(deaf).cause is Cause.PEER_LOST
    pair.gate(peer=1).end()
    assert outcome_of(kept).ok and pair.arrived(8)
    pair.gate(peer=0).fetches[0].done(CopyStatus.OK)  # too late, and of no account


def test_memory_that_nothing_stops_a_transport_from_writing_is_not_given_back(pair, monkeypatch):
    monkeypatch.setattr(memory, "CANCEL_S", 0.1)
    stuck = threading.Event()
    monkeypatch.setattr(Gate, "close", lambda self: stuck.wait(30))
    pair.write(0)
    pair.gate()
    returned, raised = pair.revoke()
    try:
        assert returned.wait(60) and "still being written 0.2 s after its grant ended" in str(raised[0])
    finally:
        stuck.set()


@pytest.mark.parametrize("ends", [True, False])
def test_fetches_of_a_peer_that_is_gone_are_cancelled_and_hold_their_grant_until_they_end(pair, ends, monkeypatch):
    monkeypatch.setattr(receiver, "LEAVE_S", 60.0 if ends else 0.2)
    pair.write(0)
    gate = pair.gate()
    pair.peers[0].close()
    wait_for(lambda: pair.receiver.log == ["start", "cancel"] or not ends)
    if ends:
        returned, _ = pair.revoke()
        assert not returned.wait(0.05)
        gate.end()
        assert returned.wait(60)
    wait_for(lambda: pair.receiver.log[-1] == "close")
    pair.there.revoke(pair.grant)


def test_closing_the_receiver_ends_what_is_under_way(pair):
    pair.write(0), pair.write(1, peer=1)
    pair.gate(peer=0), pair.gate(peer=1)
    pair.receiver.close()
    assert sorted(pair.receiver.log) == sorted(["start", "cancel", "close"] * 2)
    pair.there.revoke(pair.grant)
    for gate in pair.receiver.gates:
        gate.fetches[0].done(CopyStatus.OK)  # nobody is there to hear of it


def test_a_fetcher_that_raises_costs_one_connection(pair, monkeypatch, caplog):
    monkeypatch.setattr(Gate, "start", lambda self, fetch: 1 / 0)
    lost = pair.write(0)
    assert outcome_of(lost).cause is Cause.PEER_LOST and "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    pair.there.revoke(pair.grant)  # returns once it is cut off: it may have begun
    assert pair.receiver.log[-1] == "close"


@pytest.mark.parametrize("call", ["cancel", "close"])
def test_a_fetcher_that_raises_when_its_peer_is_gone_costs_no_other_peer(pair, monkeypatch, call):
    pair.write(0)
    gate = pair.gate()
    monkeypatch.setattr(gate, call, lambda *fetch: 1 / 0)
    pair.peers[0].close()
    wait_for(lambda: not pair.receiver._receiver._leaving and len(pair.receiver._receiver._connections) == 1)
    other = pair.write(1, peer=1)
    pair.gate(peer=1).end()
    assert outcome_of(other).ok


def test_memory_is_not_given_back_where_nobody_knows_whether_a_fetch_has_ended(pair, monkeypatch):
    monkeypatch.setattr(memory, "CANCEL_S", 0.1)
    pair.write(0)
    gate = pair.gate()
    monkeypatch.setattr(gate, "close", lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(TransferError, match="still being written"):
            pair.there.revoke(pair.grant)
    gate.fetches[0].done(CopyStatus.NO_GRANT)
    pair.there.revoke(pair.grant)


class Polled(Gate):
    """Is asked whether it is over, and has to be asked a few times."""

    poll_s = 0.001

    def start(self, fetch):
        fetch.progress = 3
        super().start(fetch)

    def go_on(self, fetch):
        fetch.progress -= 1
        return None if fetch.progress else CopyStatus.OK


def test_a_fetcher_may_be_asked_whether_a_fetch_is_over(stack, monkeypatch):
    monkeypatch.setattr(Gated, "kind", Polled)
    pair = Pair(stack)
    writes = [pair.write(number, peer=number % 2) for number in range(6)]
    assert all(outcome_of(write).ok for write in writes)
    pair.there.revoke(pair.grant)


def test_cma_gives_other_peers_their_turn_within_an_order(stack, monkeypatch):
    nbytes = 64 * MIB
    monkeypatch.setattr(cma, "STEP_NBYTES", MIB)
    pair, turns, sent = Pair(stack, cma.CmaTransport, nbytes), [], threading.Event()
    go_on = cma._MemoryReader.go_on

    def watched(self, fetch):
        status = go_on(self, fetch)
        turns.append((fetch.pieces.total, status))
        if len(turns) == 1:
            assert sent.wait(30)
        return status

    monkeypatch.setattr(cma._MemoryReader, "go_on", watched)
    long = pair.write(nbytes=nbytes)
    wait_for(lambda: turns)
    short = pair.write(nbytes=PIECE, peer=1)
    sent.set()
    assert outcome_of(long).ok and outcome_of(short).ok
    assert np.array_equal(pair.target.bytes, pair.source.bytes)
    assert turns.index((PIECE, CopyStatus.OK)) < 5 and len(turns) > 60
