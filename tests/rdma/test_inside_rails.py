"""Two rails together: both carry, one that fails costs nothing but its share, and it comes back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from ctypes import c_void_p
from typing import Any

import numpy as np
import pytest
from rdma.test_inside import EMULATED

from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.rdma import abi
from transfer.transports.rdma.pair import Pair
from transfer.transports.rdma.settings import RdmaSettings
from transfer.transports.rdma.transport import RdmaTransport
from transfer.transports.rdma.verbs import library
from transfer.transports.rdma.windows import BATCH

pytestmark = pytest.mark.inside
NBYTES = 12 * MIB
NAMES = ["rxe0:1", "rxe1:1"]


def set_link(number: int, state: str) -> None:
    subprocess.run(["ip", "link", "set", f"rail{number}", state], check=True)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def mute(sender: Any, peer: Any, number: int) -> None:
    """The sender's end of a rail answers no read any more, as one behind a cut cable; there will be another one."""
    encoder, rail = peer._encoder, sender._rails.all[number]
    gone, other = encoder._pairs[number], Pair(rail.card, encoder._queues[number], BATCH)
    encoder._pairs[number] = encoder._windows[number]._pair = other
    gone.close()


class TestRails(TransportFixtures):
    transport = RdmaTransport

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return EMULATED

    @pytest.fixture
    def peer(self, sender: Any, receiver: Any) -> Any:
        """To which both rails work."""
        peer = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        until(lambda: self.rails_in(peer) == NAMES)
        sender.take_counts()
        return peer

    @pytest.fixture(autouse=True)
    def all_up(self) -> Iterator[None]:
        yield
        for number in (0, 1):
            set_link(number, "up")

    def rails_in(self, peer: Any) -> list[str]:
        return [path.name for path in peer._encoder.paths.all if path.is_in]

    def under_way(self, peer: Any, number: int) -> bool:
        return bool(peer._encoder.paths.all[number].in_flight_nbytes)

    def test_both_carry(self, memory: Memory, there: Memory, sender: Any, peer: Any) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=1)
        self.send(peer, grant, source, NBYTES)
        assert np.array_equal(target.bytes, source.bytes)
        carried = sender.take_counts()["rail_bytes"]
        assert sorted(carried) == NAMES and sum(carried.values()) == NBYTES
        assert min(carried.values()) >= NBYTES // 8, carried

    @pytest.mark.parametrize("how", ["its port is set down", "it gets no answer"])
    def test_a_rail_that_fails_leaves_its_share_to_the_other_and_is_taken_back(
        self, memory: Memory, there: Memory, sender: Any, peer: Any, how: str
    ) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=2)
        write = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        until(lambda: self.under_way(peer, 1))
        if "port" in how:
            set_link(1, "down")
        else:
            mute(sender, peer, 1)
        assert outcome_of(write).ok
        assert np.array_equal(target.bytes, source.bytes)
        set_link(1, "up")
        until(lambda: self.rails_in(peer) == NAMES)
        counts = sender.take_counts()
        assert counts["rail_failures"] == counts["rail_recoveries"] == {"rxe1:1": 1} and peer.alive
        assert counts["rail_bytes"]["rxe0:1"] > counts["rail_bytes"].get("rxe1:1", 0)
        target.bytes[:] = 0
        self.send(peer, grant, source, NBYTES)
        assert np.array_equal(target.bytes, source.bytes)
        assert sender.take_counts()["rail_bytes"]["rxe1:1"]

    def test_a_revoked_grant_waits_for_all_its_queue_pairs(
        self, memory: Memory, there: Memory, sender: Any, peer: Any
    ) -> None:
        """Both have reads under way, and one of them gets no answer."""
        source, target, grant = self.between(memory, there, NBYTES, seed=3)
        write = peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S)
        until(lambda: self.under_way(peer, 0) and self.under_way(peer, 1) and bool(there.granted(grant.key)._holders))
        mute(sender, peer, 1)
        there.revoke(grant)
        target.bytes[:] = 7
        assert not outcome_of(write).ok
        until(lambda: not peer._encoder.paths.is_busy or not peer.alive)
        assert (target.bytes == 7).all()

    def test_where_all_are_down_the_peer_is_lost_and_one_can_connect_again(
        self, memory: Memory, there: Memory, sender: Any, receiver: Any, peer: Any
    ) -> None:
        source, target, grant = self.between(memory, there, NBYTES, seed=4)
        for number in (0, 1):
            set_link(number, "down")
        outcome = outcome_of(peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S))
        assert outcome.cause is Cause.PEER_LOST and "no rail works any more" in outcome.detail
        with pytest.raises(Unavailable):
            sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        for number in (0, 1):
            set_link(number, "up")
        again = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        self.send(again, grant, source, NBYTES)
        assert np.array_equal(target.bytes, source.bytes)


@pytest.mark.parametrize("how", ["its port is down", "it gets no answer"])
def test_a_rail_that_does_not_work_at_connect_holds_up_nothing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Cards give up one that gets no answer after so long that whoever waited for it would not connect in time."""
    settings, memory, there = RdmaSettings(lost_after_s=1000.0), Memory(), Memory()
    serve = Pair.serve
    with (
        RdmaTransport(memory, settings=settings) as sender,
        RdmaTransport(there, settings=settings) as receiver,
        monkeypatch.context() as patched,
    ):
        if "port" in how:
            set_link(0, "down")
        else:
            patched.setattr(Pair, "serve", lambda pair, *end: None if is_first(pair) else serve(pair, *end))
        memory.follow(sender)
        there.follow(receiver)
        source, target = Buffer(MIB, seed=5), Buffer(MIB)
        memory.register(source.address, MIB)
        there.register(target.address, MIB)
        peer: Any = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        assert [path.name for path in peer._encoder.paths.all if path.is_in] == NAMES[1:]
        grant = there.grant(int64(target.address), int64(MIB))
        write = peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=DEADLINE_S)
        assert outcome_of(write).ok and np.array_equal(target.bytes, source.bytes)
        if "port" in how:
            set_link(0, "up")
            until(lambda: all(path.is_in for path in peer._encoder.paths.all))


def is_first(pair: Pair) -> bool:
    return pair._card.rail.name == NAMES[0]


def test_rails_that_are_named_are_used_in_that_order_and_no_others() -> None:
    for ports, used in ((["rxe1"], NAMES[1:]), (["rxe1:1", "rxe0"], NAMES[::-1])):
        with RdmaTransport(Memory(), settings=RdmaSettings(ports=ports)) as made:
            assert [rail.card.rail.name for rail in made._rails.all] == used


def test_timeout_and_retries_of_a_queue_pair_are_those_that_are_configured() -> None:
    settings = RdmaSettings(ports=["rxe1"], gid_index=1, traffic_class=104, retries=3, lost_after_s=9.0)
    with RdmaTransport(Memory(), settings=settings) as sender, RdmaTransport(Memory(), settings=settings) as receiver:
        sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
        assert receiver._receiver is not None
        (connection,) = receiver._receiver._connections.values()
        (reader,) = connection._fetcher._readers  # type: ignore[attr-defined]
        attributes, other = abi.zeroed(abi.QP_ATTR), abi.zeroed(abi.QP_INIT_ATTR)
        asked = abi.Attributes.TIMEOUT | abi.Attributes.RETRY_CNT
        query, pointers = library().ibv_query_qp, (attributes.ctypes.data_as(c_void_p), other.ctypes.data_as(c_void_p))
        assert query(c_void_p(reader._pair.queue_pair.address), pointers[0], int(asked), pointers[1]) == 0
        assert (attributes["timeout"], attributes["retry_cnt"]) == (19, 3)
