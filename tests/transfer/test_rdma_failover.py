"""The whole transport over several rails, with a stand-in for the cards: shares, failures, revocation, recovery."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_form import LONG
from simulated.cuda_driver import LIBRARY
from simulated.verbs import QP, Fabric, Request, posted

from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Outcome, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.rdma import reader, sending, trial
from transfer.transports.rdma import transport as module
from transfer.transports.rdma.abi import Opcode
from transfer.transports.rdma.card import CELL_NBYTES
from transfer.transports.rdma.completions import Completions
from transfer.transports.rdma.fetcher import WHERE
from transfer.transports.rdma.opened import OpenRails
from transfer.transports.rdma.queue_pair import Chain
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.rdma.verbs import Limits
from transfer.transports.sender import SendingPeer
from transfer.transports.wire import CopyStatus

NBYTES = 16 * MIB
FAST = 400e6


class Pair:
    """A sender and a receiver over the cards of one fabric, and a grant of as much as there is to send."""

    def __init__(self, fabric: Fabric, rails: int | None = None) -> None:
        self.fabric = fabric
        self.memory, self.there = Memory(), Memory()
        settings = RdmaSettings(lost_after_s=0.5)
        self.sender, self.receiver = (RdmaTransport(m, settings=settings) for m in (self.memory, self.there))
        for memory, transport in ((self.memory, self.sender), (self.there, self.receiver)):
            memory.follow(transport)
        self.source, self.target = Buffer(NBYTES, seed=1), Buffer(NBYTES)
        self.memory.register(self.source.address, NBYTES)
        self.there.register(self.target.address, NBYTES)
        self.grant = self.there.grant(int64(self.target.address), int64(NBYTES))
        self.peer: Any = self.sender.connect(self.receiver.listen(), deadline_s=DEADLINE_S)
        until(lambda: len(self.rails_in) == (len(fabric.cards) if rails is None else rails))

    @property
    def rails_in(self) -> list[str]:
        return [path.name for path in self.peer._encoder.paths.all if path.is_in]

    def write(self) -> Any:
        whole = int64(self.source.address), self.grant.addresses, self.grant.nbytes
        return self.peer.write(self.grant, *whole, deadline_s=DEADLINE_S)

    def close(self) -> None:
        for transport in (self.sender, self.receiver):
            transport.close()
        self.fabric.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def without_devices() -> None:
    """What tests before have left in the stand-in for the driver: its addresses may be the host's now."""
    LIBRARY.__init__()  # type: ignore[misc]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def pair(*speeds: float) -> Pair:
        made.append(Pair(Fabric(monkeypatch, list(speeds))))
        return made[-1]

    yield pair
    for one in made:
        one.close()


def test_each_rail_carries_as_it_can(make: Callable[..., Pair]) -> None:
    pair = make(FAST, FAST / 40)  # so slow that a busy machine makes little difference
    for _ in range(8):
        assert outcome_of(pair.write()).ok
    assert np.array_equal(pair.target.bytes, pair.source.bytes)
    fast, slow = (card.moved_nbytes for card in pair.fabric.cards.values())
    assert fast > 2 * slow > 0
    counts = dict(pair.sender.take_counts())
    assert sorted(port.partition(" ")[0] for port in counts.pop("rail_opened")) == ["card0", "card1"]
    numbers = 3 * CELL_NBYTES  # of connecting, and of trying windows at either side
    assert counts == {"rail_bytes": {"card0:1": fast - numbers, "card1:1": slow - numbers}}


@pytest.mark.parametrize("how", ["is_up", "answers", "speaks"])
def test_a_rail_that_fails_leaves_what_is_unfinished_to_the_other_and_is_taken_back(
    make: Callable[..., Pair], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make(FAST, FAST)
    card = pair.fabric.cards["card1"]
    writes = [pair.write() for _ in range(3)]
    until(lambda: card.moved_nbytes > MIB)
    setattr(card, how, False)
    assert [outcome_of(write).ok for write in writes] == [True] * 3
    assert np.array_equal(pair.target.bytes, pair.source.bytes)
    assert pair.rails_in == ["card0:1"]
    assert pair.sender.take_counts()["rail_failures"] == {"card1:1": 1}
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("rail card1:1 to a peer is out" in line for line in lines) == 1
    setattr(card, how, True)
    until(lambda: pair.rails_in == ["card0:1", "card1:1"])
    assert pair.sender.take_counts()["rail_recoveries"] == {"card1:1": 1}
    before = card.moved_nbytes
    assert outcome_of(pair.write()).ok and card.moved_nbytes > before + MIB


def test_of_many_requests_few_have_a_completion(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[Request]] = []
    post = QP.post

    def seen(pair: QP, chain: Chain) -> None:
        batches.append([request for request in posted(chain) if request.opcode is Opcode.RDMA_READ])
        post(pair, chain)

    monkeypatch.setattr(QP, "post", seen)
    pair = make(1e12)
    batches.clear()
    count, apart = 4096, NBYTES // 4096
    places = np.arange(count) * apart
    whole = pair.source.address + places, pair.target.address + places, np.full(count, apart // 2)
    assert outcome_of(pair.peer.write(pair.grant, *whole, deadline_s=DEADLINE_S)).ok
    there, here = (buffer.bytes.reshape(count, apart)[:, : apart // 2] for buffer in (pair.target, pair.source))
    assert np.array_equal(there, here)
    batches = [batch for batch in batches if batch]
    assert sum(map(len, batches)) == count and len(batches) <= count / 8
    for batch in batches:
        *silent, last = (request.is_signaled for request in batch)
        assert last and not any(silent) and len(batch) <= reader.BATCH


@pytest.mark.parametrize(("ranges", "expected_ranges"), [((5, 3), 3), ((3, 5), 3), ((3, 0), 3)])
@pytest.mark.parametrize(("reads", "expected_reads"), [((9, 4), 4), ((4, 9), 4), ((4, 0), 4)])
def test_nothing_is_asked_of_a_card_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
    ranges: tuple[int, int],
    expected_ranges: int,
    reads: tuple[int, int],
    expected_reads: int,
) -> None:
    """The second of each is that of reads alone, of which a card may say nothing."""
    fabric, asked = Fabric(monkeypatch, [1e12]), []
    fabric.limits, fabric.max_msg_nbytes = Limits(True, 10, 8, *ranges, *reads), 8192
    post = QP.post

    def seen(pair: QP, chain: Chain) -> None:
        asked.extend(request.ranges for request in posted(chain) if request.opcode is Opcode.RDMA_READ)
        post(pair, chain)

    monkeypatch.setattr(QP, "post", seen)
    pair = Pair(fabric)
    count = 64
    sizes, places = np.full(count, 700), np.arange(count) * 1024
    whole = pair.source.address + np.arange(count) * 700, pair.target.address + places, sizes
    assert outcome_of(pair.peer.write(pair.grant, *whole, deadline_s=DEADLINE_S)).ok
    assert outcome_of(pair.write()).ok and np.array_equal(pair.target.bytes, pair.source.bytes)
    assert max(len(one) for one in asked) == expected_ranges
    assert 4096 <= max(sum(nbytes for _, nbytes, _ in one) for one in asked) <= 8192
    told = [found.set for found in fabric.queues.values()]
    assert {one["max_rd_atomic"] for one in told} == {one["max_dest_rd_atomic"] for one in told} == {expected_reads}
    (rail,) = pair.receiver._rails.all
    assert rail.card.max_requests == 7
    pair.close()


def test_memory_is_registered_with_each_card_once_however_much_is_sent_of_it(make: Callable[..., Pair]) -> None:
    pair = make(FAST, FAST)
    for _ in range(4):
        assert outcome_of(pair.write()).ok
    for buffer in (pair.source, pair.target):
        assert pair.fabric.registered.count((buffer.address, NBYTES)) == 2


@pytest.mark.parametrize("dies", ["when it is known", "before it is known"])
def test_a_transport_stays_open_until_a_peer_that_is_lost_is_closed(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """What its peers had ends before the cards."""
    pair, is_closing, may_go_on, ends = make(FAST), threading.Event(), threading.Event(), list[str]()
    close, close_rails = sending.RailEncoder.close, OpenRails.close

    def close_late(encoder: sending.RailEncoder) -> None:
        is_closing.set()
        may_go_on.wait(DEADLINE_S)
        close(encoder)
        ends.append("peer")

    def close_all(rails: OpenRails) -> None:
        close_rails(rails)
        ends.append("rails")

    if "before" in dies:
        pair.peer.close()
        monkeypatch.setattr(sending.RailEncoder, "close", close_late)
        gone = Outcome(Cause.PEER_LOST, "it is gone")
        monkeypatch.setattr(SendingPeer, "_turn", lambda peer, wait_s: peer._die(gone))

        def connect() -> None:
            with contextlib.suppress(Unavailable):  # by when the transport is closed
                pair.sender.connect(pair.receiver.listen(), deadline_s=DEADLINE_S)

        threading.Thread(target=connect).start()
        until(lambda: bool(pair.sender._peers))
    else:
        monkeypatch.setattr(sending.RailEncoder, "close", close_late)
        pair.receiver.close()
    assert is_closing.wait(DEADLINE_S)
    monkeypatch.setattr(OpenRails, "close", close_all)
    closing = threading.Thread(target=pair.sender.close)
    closing.start()
    closing.join(0.5)
    may_go_on.set()
    closing.join(DEADLINE_S)
    assert ends == ["peer", "rails"]


def test_a_transport_that_was_closed_meanwhile_is_unavailable(make: Callable[..., Pair]) -> None:
    pair = make(FAST)
    endpoint = pair.receiver.listen()
    pair.sender.close()
    with pytest.raises(Unavailable, match="closed"):
        pair.sender.connect(endpoint, deadline_s=DEADLINE_S)


def test_a_revoked_grant_is_written_by_no_rail(make: Callable[..., Pair]) -> None:
    pair = make(FAST, FAST / 2, FAST)
    writes = [pair.write() for _ in range(3)]
    until(lambda: min(card.moved_nbytes for card in pair.fabric.cards.values()) > MIB // 2)
    pair.fabric.cards["card1"].answers = False
    pair.there.revoke(pair.grant)
    pair.target.bytes[:] = 7
    assert {outcome_of(write).cause for write in writes} <= {Cause.REFUSED, Cause.SOURCE, None}
    assert outcome_of(writes[-1]).cause is Cause.REFUSED
    until(lambda: not pair.peer._encoder.paths.is_busy)
    assert (pair.target.bytes == 7).all()


@pytest.mark.parametrize("how", ["is_up", "answers"])
def test_where_no_rail_is_left_the_peer_is_lost_and_one_can_connect_again(
    make: Callable[..., Pair], how: str
) -> None:
    pair = make(FAST, FAST)
    for card in pair.fabric.cards.values():
        setattr(card, how, False)
    outcome = outcome_of(pair.write())
    assert outcome.cause is Cause.PEER_LOST and "no rail works any more" in outcome.detail
    with pytest.raises(Unavailable, match="cannot read over card[01] port 1" if how == "answers" else "port is down"):
        pair.sender.connect(pair.receiver.listen(), deadline_s=DEADLINE_S)
    setattr(pair.fabric.cards["card1"], how, True)
    pair.peer = pair.sender.connect(pair.receiver.listen(), deadline_s=DEADLINE_S)
    assert pair.rails_in == ["card1:1"]
    assert outcome_of(pair.write()).ok
    assert np.array_equal(pair.target.bytes, pair.source.bytes)


def test_a_rail_that_does_not_work_from_the_beginning_costs_no_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = Fabric(monkeypatch, [FAST, FAST])
    fabric.cards["card0"].answers = False
    pair = Pair(fabric, rails=1)
    assert pair.rails_in == ["card1:1"] and outcome_of(pair.write()).ok
    assert pair.sender.take_counts()["rail_failures"] == {"card0:1": 1}
    fabric.cards["card0"].answers = True
    until(lambda: pair.rails_in == ["card0:1", "card1:1"])
    pair.close()


def test_rails_that_are_silent_hold_up_no_connection_and_are_taken_in_as_they_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody gives them up here: whoever waits for one before it tries the next waits until its deadline."""
    monkeypatch.setattr(reader, "SILENCE", 1e6)
    monkeypatch.setattr(trial, "WINDOW_PATIENCE_S", 0.01)
    fabric = Fabric(monkeypatch, [FAST] * 4)
    silent = [fabric.cards[name] for name in ("card0", "card1", "card3")]
    for card in silent:
        card.speaks = False
    pair = Pair(fabric, rails=1)
    assert pair.rails_in == ["card2:1"] and outcome_of(pair.write()).ok
    assert np.array_equal(pair.target.bytes, pair.source.bytes)
    for card in silent:
        card.speaks = True
    until(lambda: len(pair.rails_in) == 4)
    assert "rail_failures" not in pair.sender.take_counts(), "none of them failed"
    assert outcome_of(pair.write()).ok and min(card.moved_nbytes for card in silent) > CELL_NBYTES
    pair.close()


def test_a_peer_that_answers_what_was_not_asked_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "take_answer", lambda *_: (9, CopyStatus.OK))
    with pytest.raises(Unavailable, match="answers order 9, which is not open"):
        Pair(Fabric(monkeypatch, [FAST]))


class TestSpinning:
    """Who posts a small fetch looks for its completion, for a moment; the other thread is told of all others."""

    @pytest.fixture
    def pair(self, make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> Pair:
        self.told, self.looked = 0, 0
        told, spin = Completions._take, reader.Reader._spin

        def take(completions: Completions) -> None:
            self.told += 1
            told(completions)

        def look(made: reader.Reader, over: Any) -> None:
            self.looked += not made._left_out
            spin(made, over)

        monkeypatch.setattr(Completions, "_take", take)
        monkeypatch.setattr(reader.Reader, "_spin", look)
        monkeypatch.setattr(reader, "SPIN_S", DEADLINE_S)
        pair = make(FAST)
        self.told = self.looked = 0
        return pair

    def send(self, pair: Pair) -> Any:
        small = int64(pair.source.address), int64(pair.target.address), int64(16 << 10)
        return pair.peer.write(pair.grant, *small, deadline_s=DEADLINE_S)

    def test_what_is_there_in_time_costs_no_other_thread(self, pair: Pair) -> None:
        for _ in range(20):
            assert outcome_of(self.send(pair)).ok
        assert self.looked == 20 and self.told <= 1, "what is left of connecting may be told late"
        self.told = 0
        assert outcome_of(pair.write()).ok and self.told > 0, "one that is not small is not waited for"
        assert np.array_equal(pair.target.bytes, pair.source.bytes)

    def test_where_it_is_in_vain_it_is_rarely_done_and_nothing_is_lost(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader, "SPIN_S", 0.0)
        card = pair.fabric.cards["card0"]
        for number in range(20):
            card.speaks = False
            write = self.send(pair)
            until(lambda: self.number_under_way(pair) > 0)
            card.speaks = True
            assert outcome_of(write).ok
            assert self.told >= number + 1
        assert self.looked == 4, "after 1, 3 and 7 that were left out"
        assert np.array_equal(pair.target.bytes[: 16 << 10], pair.source.bytes[: 16 << 10])

    def number_under_way(self, pair: Pair) -> int:
        """Fetches of which the other thread will tell."""
        assert pair.receiver._receiver is not None
        (connection,) = pair.receiver._receiver._connections.values()
        (one,) = connection._fetcher._readers  # type: ignore[attr-defined]
        return len(one._batches) if one._is_heard else 0


def test_a_key_that_is_refused_fails_its_write_and_all_others_arrive(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make(FAST, FAST)
    other = Buffer(MIB, seed=2)
    pair.memory.register(other.address, MIB)
    encoder = pair.peer._encoder
    tell = encoder._told

    def told(path: Any, part: Any) -> bytes:
        first = int(np.asarray(part.pieces.local)[0])
        is_other = other.address <= first < other.address + MIB
        keys: bytes = encoder._cards[path.number].unreadable(part.pieces) if is_other else tell(path, part)
        return keys

    monkeypatch.setattr(encoder, "_told", told)
    bad = pair.peer.write(
        pair.grant, int64(other.address), pair.grant.addresses, int64(MIB), deadline_s=DEADLINE_S
    )
    assert outcome_of(bad).cause is Cause.SOURCE
    assert outcome_of(pair.write()).ok
    assert np.array_equal(pair.target.bytes, pair.source.bytes)


def test_what_broke_at_the_peer_is_said_in_one_line(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And not that its windows do not close over what is broken."""
    pair = make(FAST)
    encoder = pair.peer._encoder
    opens, wrong = encoder._told, iter([True])

    def told(path: Any, part: Any) -> bytes:
        keys: bytes = opens(path, part)
        return encoder._cards[path.number].unreadable(part.pieces) if next(wrong, False) else keys

    monkeypatch.setattr(encoder, "_told", told)
    caplog.clear()
    assert outcome_of(pair.write()).ok
    assert np.array_equal(pair.target.bytes, pair.source.bytes)
    reading, out, back = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "remote access error" in reading and "is back" in back
    assert "is out: its queue pair broke (the peer logged why)" in out


@pytest.mark.parametrize("where", [b"", WHERE.pack(9, 0), WHERE.pack(0, 1 << 31)])
def test_an_order_that_names_no_rail_or_an_epoch_to_come_costs_its_connection(
    make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, where: bytes
) -> None:
    monkeypatch.setattr("transfer.transports.memory.CANCEL_S", 0.2)  # the order that is over never ends by itself
    pair = make(FAST, FAST)
    with monkeypatch.context() as patched:
        patched.setattr(sending, "WHERE", SimpleNamespace(pack=lambda *_: where))
        assert outcome_of(pair.write()).cause is Cause.PEER_LOST
    pair.there.revoke(pair.grant)
    pair.grant = pair.there.grant(pair.grant.addresses, pair.grant.nbytes)
    pair.peer = pair.sender.connect(pair.receiver.listen(), deadline_s=DEADLINE_S)
    assert outcome_of(pair.write()).ok


def test_the_control_connection_goes_over_the_first_address_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric, hosts = Fabric(monkeypatch, [FAST]), ("127.0.0.1", "127.0.0.2")
    with RdmaTransport(Memory(), hosts=hosts) as sender, RdmaTransport(Memory(), hosts=hosts) as receiver:
        endpoint = receiver.listen()
        peer: Any = sender.connect(endpoint, deadline_s=DEADLINE_S)
        assert peer.paths == ["127.0.0.1->127.0.0.1#0"]
        assert receiver._receiver is not None
        listeners = receiver._receiver._listeners
        listeners[min(listeners)].shutdown(socket.SHUT_RDWR)
        again: Any = sender.connect(endpoint, deadline_s=DEADLINE_S)
        assert again.paths == ["127.0.0.2->127.0.0.2#0"]
    fabric.close()


@settings(max_examples=30 if LONG else 8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["is_up", "answers", "speaks", "binds"]), st.floats(0.001, 0.05)),
        min_size=1, max_size=8,
    ),
    st.booleans(),
)  # fmt: skip
def test_whatever_rails_do_while_one_works_every_write_arrives_whole(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, str, float]], has_windows: bool
) -> None:
    """A slice is sent again as often as it takes here, since rails break more often than they ever would."""
    monkeypatch.setattr(sending, "MAX_TRIES", 1000)
    pair = Pair(Fabric(monkeypatch, [FAST] * 4, has_windows=has_windows))
    cards = list(pair.fabric.cards.values())

    def disturb() -> None:
        for number, how, wait_s in steps:
            setattr(cards[number], how, not getattr(cards[number], how))
            time.sleep(wait_s)

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    writes = [pair.write() for _ in range(4)]
    assert [str(outcome_of(write)) for write in writes] == ["ok"] * 4
    disturbing.join()
    assert np.array_equal(pair.target.bytes, pair.source.bytes)
    pair.there.revoke(pair.grant)
    pair.close()
