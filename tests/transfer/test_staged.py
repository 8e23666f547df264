"""Memory of a device over `tcp`, `shm` and a library, through page-locked stages; over a stand-in for the driver.

The processor cannot touch the stand-in's device memory here: whatever does not go through the driver crashes.
"""

import ctypes
import os
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from certificates import CAN_MAKE, make_certificate, tls_process
from long_form import LONG
from simulated.completion_queue import LongQueueTransport, StagedQueueTransport
from simulated.cuda_driver import LIBRARY, SealedBuffer, StagedShm, StagedTcp, fold_on_device
from simulated.library import StagedLibrary
from simulated.waiting import wait_for

from transfer.testing.conformance import TransportConformance
from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import OK, Cause, Completion, Grant, Outcome, Peer, Unavailable
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.fetched import LandingFetcher
from transfer.transports.cuda.stage import MORE_STAGES, NUM_STAGES, STAGE_NBYTES, OnDevice, Stages
from transfer.transports.cuda.staged import StagedPeer
from transfer.transports.memory import Memory
from transfer.transports.passing import Mark, decode_mark
from transfer.transports.pull import Fetch, Fetcher
from transfer.transports.vectors import Pieces
from transfer.transports.wire import ANSWER_NBYTES, CopyOrder, CopyStatus, decode_answer

TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The stand-in, without a past; other processes find it as well."""
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
    LIBRARY.__init__()
    yield LIBRARY
    assert not LIBRARY.contexts and not LIBRARY.locked and not LIBRARY._queues, "all is given back"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


class StagedConformance(TransportConformance):
    @pytest.mark.slow
    @pytest.mark.long
    def test_a_piece_beyond_4_gib_arrives(self, memory, there, peer, monkeypatch):
        if not LONG and type(self) not in (TestTcp, TestFetching):
            pytest.skip("what is sent they all cut into stages alike (`make test-long`)")
        fold_on_device(monkeypatch)
        super().test_a_piece_beyond_4_gib_arrives(memory, there, peer)


class TestTcp(StagedConformance):
    """Over two networks; `TestReceiving` has one stream."""

    transport = StagedTcp

    @pytest.fixture
    def options(self):
        return {"hosts": ["127.0.0.1", "127.0.0.2"], "streams": 2}


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MAKE, reason="NOT TESTED: certificates are made with openssl")
class TestTcpWithTls(StagedConformance):
    transport = StagedTcp

    @pytest.fixture
    def options(self, certificate):
        with tls_process(certificate):
            yield {"tls": certificate, "lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds


class TestShm(StagedConformance):
    transport = StagedShm


class TestFetching(StagedConformance):
    """Fetches fill the stages, as those of an RDMA card do."""

    transport = StagedQueueTransport


class TestLibrary(StagedConformance):
    """A library reads from stages, and what it has read goes through stages."""

    transport = StagedLibrary

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds


class Wire(Peer):
    """In place of the peer that sends: what it is given is under way until the test says more."""

    transport = "wire"
    alive = True

    def __init__(self, num_paths=1):
        self.num_paths = num_paths
        self.writes = []
        self.marks = []

    def write(self, grant, local, remote, nbytes, *, deadline_s, whole_nbytes, mark=None):
        self.whole_nbytes = whole_nbytes
        completion = Completion(time.monotonic() + deadline_s)
        self.marks.append(None if mark is None else decode_mark(mark(Pieces.of(local, remote, nbytes))))
        sent = b"".join(ctypes.string_at(*piece) for piece in zip(local.tolist(), nbytes.tolist(), strict=True))
        self.writes.append((completion, sent))
        return completion

    def close(self):
        self.alive = False
        for completion, _ in self.writes:
            completion.settle(Outcome(Cause.PEER_LOST, "closed"))


class TestSending:
    """What `StagedPeer` does, over a wire of which the test knows everything."""

    @pytest.fixture
    def memory(self):
        self.sources = []
        return Memory()

    @pytest.fixture
    def wire(self):
        return Wire()

    @pytest.fixture
    def peer(self, memory, wire, library):
        stages = Stages(OnDevice(Driver(library), 0), memory)
        peer = StagedPeer(wire, memory, stages, lambda addresses, nbytes: False)
        yield peer
        peer.close()
        stages.close()
        assert not any(region.is_stage for region in memory.regions)

    def begin(self, peer, memory, nbytes, deadline_s=DEADLINE_S, **checks):
        source = SealedBuffer(nbytes, seed=1)
        self.sources.append(source)  # which may be read as long as the test goes on
        memory.register(source.address, nbytes)
        grant = Grant(b"k" * 16, int64(4096), int64(nbytes))
        whole = int64(source.address), int64(4096), int64(nbytes)
        return source, peer.write(grant, *whole, deadline_s=deadline_s, **checks)

    def test_who_wants_to_see_the_bytes_is_shown_each_of_them_once_before_the_outcome(self, memory, wire, peer):
        seen = []
        source, completion = self.begin(
            peer, memory, 3 * STAGE_NBYTES + 5, seen=lambda part: seen.append(part.tobytes())
        )
        for number in range(4):
            wait_for(lambda: len(wire.writes) > number)  # noqa: B023
            assert completion.outcome is None
            wire.writes[number][0].settle(OK)
        assert outcome_of(completion).ok and b"".join(seen) == source.bytes.tobytes()

    def test_with_the_number_of_a_batch_each_part_is_marked_with_its_place_and_its_digest(self, memory, wire, peer):
        _, completion = self.begin(peer, memory, 2 * STAGE_NBYTES + 5, batch=7)
        for number in range(3):
            wait_for(lambda: len(wire.writes) > number)  # noqa: B023
            wire.writes[number][0].settle(OK)
        assert outcome_of(completion).ok
        sent = [xxhash.xxh3_64_intdigest(data) for _, data in wire.writes]
        assert wire.marks == [Mark(7, part * STAGE_NBYTES, digest) for part, digest in enumerate(sent)]
        self.begin(peer, memory, 5)
        wait_for(lambda: len(wire.writes) == 4)
        assert wire.marks[3] is None

    def test_the_next_part_is_gathered_while_others_are_sent_and_no_more_than_there_are_stages(
        self, memory, wire, peer, library
    ):
        source, completion = self.begin(peer, memory, 6 * STAGE_NBYTES)
        wait_for(lambda: len(wire.writes) == NUM_STAGES)
        gathered = library.calls["cuMemcpyAsync"]
        assert gathered == NUM_STAGES and completion.outcome is None
        for number in range(6):
            wait_for(lambda: len(wire.writes) == min(6, number + NUM_STAGES))  # noqa: B023
            assert completion.outcome is None
            wire.writes[number][0].settle(OK)
        assert outcome_of(completion).ok
        assert b"".join(sent for _, sent in wire.writes) == source.bytes.tobytes(), "each byte once, in order"
        assert library.calls["cuMemcpyAsync"] == 6

    @pytest.mark.parametrize("how", ["cancelled", "refused", "unregistered", "closed"])
    def test_nothing_is_read_after_an_outcome_and_what_is_under_way_is_given_up(
        self, memory, wire, peer, library, how
    ):
        source, completion = self.begin(peer, memory, 6 * STAGE_NBYTES)
        wait_for(lambda: len(wire.writes) == NUM_STAGES)
        if how == "cancelled":
            completion.cancel()
        elif how == "refused":
            wire.writes[1][0].settle(Outcome(Cause.REFUSED, "no grant"))
        elif how == "unregistered":
            memory.unregister(next(region for region in memory.regions if region.address == source.address))
        else:
            peer.close()
        expected = {"cancelled": Cause.CANCELLED, "refused": Cause.REFUSED, "unregistered": Cause.SOURCE}
        assert outcome_of(completion).cause is expected.get(how, Cause.PEER_LOST)
        assert all(sent.outcome is not None for sent, _ in wire.writes)
        assert library.calls["cuMemcpyAsync"] == NUM_STAGES
        if how != "closed":
            _, second = self.begin(peer, memory, 100)
            wait_for(lambda: len(wire.writes) == NUM_STAGES + 1)
            wire.writes[-1][0].settle(OK)
            assert outcome_of(second).ok, "the stages are free again"

    def test_each_further_path_has_stages_and_a_part_is_cut_as_the_whole_write_would_be(self, memory, library):
        stages, wire = Stages(OnDevice(Driver(library), 0), memory), Wire(num_paths=4)
        peer = StagedPeer(wire, memory, stages, lambda addresses, nbytes: False)
        self.begin(peer, memory, 20 * STAGE_NBYTES)
        wait_for(lambda: len(wire.writes) == NUM_STAGES + 3 * MORE_STAGES)
        assert wire.whole_nbytes == 20 * STAGE_NBYTES
        peer.close()
        stages.close()

    def test_where_page_locked_memory_ends_several_paths_share_what_is_enough_for_one(self, memory, library, caplog):
        stages, wire = Stages(OnDevice(Driver(library), 0), memory), Wire(num_paths=4)
        library.fail["cuMemHostAlloc"] = NUM_STAGES + 1
        peer = StagedPeer(wire, memory, stages, lambda addresses, nbytes: False)
        self.begin(peer, memory, 20 * STAGE_NBYTES)
        wait_for(lambda: len(wire.writes) == NUM_STAGES + 1)
        assert "wire: little page-locked memory to send from: cuMemHostAlloc" in caplog.text
        peer.close()
        stages.close()

    def test_a_write_that_ends_just_before_it_is_gathered_is_not_read(self, memory, peer, library, monkeypatch):
        move = StagedPeer._move

        def move_late(self, write, stage):
            write.completion.cancel()
            move(self, write, stage)

        monkeypatch.setattr(StagedPeer, "_move", move_late)
        _, completion = self.begin(peer, memory, 100)
        assert outcome_of(completion).cause is Cause.CANCELLED
        wait_for(lambda: len(peer._free) == NUM_STAGES)
        assert library.calls["cuMemcpyAsync"] == 0

    def test_a_deadline_is_kept_by_a_write_that_waits_for_a_stage(self, memory, wire, peer):
        _, first = self.begin(peer, memory, NUM_STAGES * STAGE_NBYTES)
        wait_for(lambda: len(wire.writes) == NUM_STAGES)
        _, late = self.begin(peer, memory, 100, deadline_s=0.05)
        assert outcome_of(late).cause is Cause.DEADLINE and first.outcome is None

    def test_a_device_that_fails_is_an_outcome_and_the_next_write_goes_on(self, memory, wire, peer, library, caplog):
        library.fail["cuStreamSynchronize"] = 0
        _, completion = self.begin(peer, memory, 100)
        assert outcome_of(completion).cause is Cause.SOURCE and not wire.writes
        assert "the device's memory could not be sent: cuStreamSynchronize" in caplog.text
        del library.fail["cuStreamSynchronize"]
        self.begin(peer, memory, 100)
        wait_for(lambda: wire.writes)

    def test_without_page_locked_memory_the_transport_is_unavailable(self, memory, library):
        with StagedTcp(memory) as sender, StagedTcp(Memory()) as receiver:
            library.fail["cuMemHostAlloc"] = 1
            with pytest.raises(Unavailable, match="no page-locked memory to send from"):
                sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
            del library.fail["cuMemHostAlloc"]
            sender.connect(receiver.listen(), deadline_s=DEADLINE_S)


class TestReceiving(TransportFixtures):
    """What the device of the receiver does or fails to do."""

    transport = StagedTcp

    @pytest.fixture(params=[StagedTcp, StagedShm])
    def kind(self, request, monkeypatch):
        monkeypatch.setattr(type(self), "transport", request.param)

    @pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuStreamSynchronize", "cuMemHostAlloc"])
    def test_a_device_that_fails_is_an_outcome_and_the_connection_goes_on(
        self, kind, memory, there, peer, library, caplog, name
    ):
        host = Memory()
        host_sender = self.transport.__mro__[1](host)
        with host_sender, self.make(there) as receiver:
            peer = host_sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
            source, target = Buffer(MIB, seed=1), SealedBuffer(MIB)
            host.register(source.address, MIB)
            there.register(target.address, MIB)
            grant = there.grant(int64(target.address), int64(MIB))
            library.fail[name] = 0
            outcome = outcome_of(peer.write(grant, *self.all_of(source, grant), deadline_s=DEADLINE_S))
            assert outcome.cause is Cause.REFUSED and name in caplog.text
            del library.fail[name]
            there.revoke(grant)
            grant = there.grant(int64(target.address), int64(MIB))
            self.send(peer, grant, source, MIB)
            assert np.array_equal(target.bytes, source.bytes)

    def test_a_grant_ends_while_the_device_still_has_what_arrived(self, memory, there, sender, receiver, library):
        """Of an order that is half there: revoking waits for the device, and what comes after it is not written."""
        nbytes = 4 * STAGE_NBYTES
        target = SealedBuffer(nbytes)
        there.register(target.address, nbytes)
        grant = there.grant(int64(target.address), int64(nbytes))
        order = CopyOrder(1, grant.key, 1, nbytes)
        stream = sender._reach(receiver.listen(), time.monotonic() + DEADLINE_S)[0]
        stream.channel.socket.setblocking(True)
        stream.channel.sendall(order.encode([target.address], [nbytes]))
        stream.channel.sendall(b"\1" * (2 * STAGE_NBYTES + 5))
        wait_for(lambda: library.calls["cuMemcpyAsync"] >= 2)
        there.revoke(grant)
        written = int(np.count_nonzero(target.bytes))
        assert written <= 2 * STAGE_NBYTES
        target.bytes[:] = 7
        stream.channel.sendall(b"\1" * (2 * STAGE_NBYTES - 5))
        stream.channel.socket.settimeout(DEADLINE_S)
        answer = b""
        while len(answer) < ANSWER_NBYTES:
            answer += stream.channel.socket.recv(ANSWER_NBYTES - len(answer))
        assert decode_answer(answer) == (1, CopyStatus.NO_GRANT)
        assert (target.bytes == 7).all()
        stream.channel.close()

    def test_a_sender_killed_in_mid_order_leaves_nothing_under_way(self, there, receiver, other, library):
        nbytes = 64 * MIB
        target = SealedBuffer(nbytes)
        there.register(target.address, nbytes)
        grant = there.grant(int64(target.address), int64(nbytes))
        send = {"endpoint": receiver.listen().hex(), "key": grant.key.hex(), "address": target.address}
        other.tell(do="send", nbytes=nbytes, **send)
        wait_for(lambda: library.calls["cuMemcpyAsync"] >= 4)
        other.kill()
        there.revoke(grant)
        target.bytes[:] = 7
        wait_for(lambda: not receiver._receiver._connections)
        assert (target.bytes == 7).all() and not any(library._queues.values())
        assert receiver.stages._free.qsize() == len(library.locked) > 0, "what was taken is there for the next"


class Posted:
    """In place of the connection and its thread."""

    def __init__(self):
        self.todo = []
        self.over = []

    def post(self, work):
        self.todo.append(work)

    def finish(self, fetch, status):
        self.over.append((fetch.number, status))

    def cancel(self, fetch):
        self.fetcher.cancel(fetch)

    def run(self):
        while self.todo:
            self.todo.pop(0)()


class Pending(Fetcher):
    """What fills the stages is over when the test says so."""

    max_under_way = 8

    def __init__(self, num_lanes=1):
        self.num_lanes = num_lanes
        self.started, self.cancelled, self.is_closed = [], [], False

    def lane(self, fetch):
        return fetch.number % self.num_lanes

    def start(self, fetch):
        self.started.append(fetch)

    def cancel(self, fetch):
        self.cancelled.append(fetch)

    def close(self):
        self.is_closed = True

    def end(self, number, status=CopyStatus.OK):
        part = self.started[number]
        for address, nbytes in zip(part.pieces.remote, part.pieces.nbytes, strict=True):
            ctypes.memset(int(address), 1 + number, int(nbytes))
        part.done(status)


class TestLandingOfFetches:
    """What `LandingFetcher` does, over fetches of which the test knows everything."""

    @pytest.fixture(autouse=True)
    def parts(self, library):
        self.library, self.memory, self.thread, self.inner = library, Memory(), Posted(), Pending()
        self.stages = Stages(OnDevice(Driver(library), 0))
        self.fetcher, self.targets = LandingFetcher(self.inner, self.stages), []
        yield
        self.fetcher.close()
        self.stages.close()

    def order(self, num_parts, number=1):
        """An order of so many stages, which holds its grant as `PullConnection` has it."""
        nbytes = num_parts * STAGE_NBYTES
        target = SealedBuffer(nbytes)
        self.targets.append(target)  # which may be written as long as the test goes on
        self.memory.register(target.address, nbytes)
        grant = self.memory.grant(int64(target.address), int64(nbytes))
        held = self.memory.granted(grant.key)
        fetch = Fetch(number, Pieces([4096], [target.address], [nbytes], nbytes), b"keys", held, self.thread)
        assert held.hold(fetch) and self.fetcher.start(fetch) is None
        return target, grant, fetch

    def end(self, number, status=CopyStatus.OK):
        self.inner.end(number, status)
        self.thread.run()

    def written(self, target):
        """The number of the part that is in each stage's worth of the target."""
        return target.bytes[::STAGE_NBYTES].tolist()

    def test_the_device_empties_one_while_others_are_filled_and_there_are_no_more_than_so_many(self):
        target, _, _ = self.order(6)
        assert len(self.inner.started) == NUM_STAGES == 3
        self.end(0)
        assert self.library.calls["cuMemcpyAsync"] == 1 and self.library.calls["cuStreamSynchronize"] == 0
        self.end(2)
        assert len(self.inner.started) == 4, "its stage is that of the first, which was waited for"
        for number in (1, 3, 4, 5):
            assert not self.thread.over
            self.end(number)
        assert self.thread.over == [(1, CopyStatus.OK)] and self.written(target) == [1, 2, 3, 4, 5, 6]
        assert len(self.library.locked) == 3
        assert all(part.attachment == b"keys" for part in self.inner.started)

    def test_what_one_fetch_says_is_said_of_the_order_and_no_further_part_is_fetched(self):
        target, _, _ = self.order(6)
        self.end(0)
        self.end(1, CopyStatus.BROKEN)
        assert not self.thread.over, "a fetch is under way"
        self.end(2)
        assert self.thread.over == [(1, CopyStatus.BROKEN)] and len(self.inner.started) == 3
        assert self.written(target) == [1, 0, 0, 0, 0, 0]
        self.order(1, number=2)
        self.end(3)
        assert self.thread.over[1:] == [(2, CopyStatus.OK)], "the stages are free again"

    def test_a_grant_ends_when_nothing_that_was_fetched_for_it_is_under_way(self):
        target, grant, _ = self.order(4)
        self.end(0)
        self.thread.fetcher = self.fetcher
        wait = self.memory.begin_revoke(grant)
        assert wait is not None
        self.thread.run()
        assert self.inner.cancelled and self.written(target) == [1, 0, 0, 0], "what the device had is waited for"
        for number in (1, 2):
            self.end(number)
        wait()
        assert self.thread.over == [(1, CopyStatus.NO_GRANT)] and self.written(target) == [1, 0, 0, 0]

    @pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuStreamSynchronize"])
    def test_a_device_that_fails_is_an_answer_and_the_next_order_goes_on(self, name):
        self.order(1)
        self.library.fail[name] = 0
        self.end(0)
        assert self.thread.over == [(1, CopyStatus.UNWRITABLE)]
        del self.library.fail[name]
        target, _, _ = self.order(1, number=2)
        self.end(1)
        assert self.thread.over[1:] == [(2, CopyStatus.OK)] and self.written(target) == [2]

    def test_with_little_page_locked_memory_it_goes_on_with_what_there_is_and_without_any_it_refuses(self):
        self.library.fail["cuMemHostAlloc"] = 1
        target, _, _ = self.order(3)
        assert len(self.inner.started) == 1
        for number in range(3):
            self.end(number)
        assert self.thread.over == [(1, CopyStatus.OK)] and self.written(target) == [1, 2, 3]
        self.stages._free.get_nowait().close()
        fetch = Fetch(2, Pieces([4096], [target.address], [1], 1), b"", None, self.thread)
        assert self.fetcher.start(fetch) is CopyStatus.UNWRITABLE

    def test_each_lane_is_filled_beside_the_others_and_one_that_is_silent_keeps_none_from_it(self):
        self.inner = Pending(num_lanes=2)
        self.fetcher = LandingFetcher(self.inner, self.stages)
        self.order(9, number=1)
        assert len(self.inner.started) == 3, "no more for one lane"
        target, _, fetch = self.order(4, number=2)
        assert [part.number for part in self.inner.started] == [1, 1, 1, 2, 2]
        for number in (3, 4, 5, 6):
            self.end(number)
        self.fetcher.go_on(fetch)
        self.thread.run()
        assert self.thread.over == [(2, CopyStatus.OK)] and self.written(target) == [4, 5, 6, 7]
        assert len(self.library.locked) == 5
        _, _, fetch = self.order(1, number=4)
        self.end(7)
        self.fetcher.go_on(fetch)
        self.thread.run()
        assert self.thread.over[1:] == [(4, CopyStatus.OK)]
        self.end(0)
        assert [part.number for part in self.inner.started[8:]] == [1]

    def test_of_an_order_at_which_the_device_fails_no_further_part_is_fetched(self):
        self.library.fail["cuMemHostAlloc"] = 1
        self.order(2, number=1)
        self.order(1, number=2)
        self.library.fail["cuStreamSynchronize"] = 0
        self.end(0)
        del self.library.fail["cuStreamSynchronize"]
        assert self.thread.over == [(1, CopyStatus.UNWRITABLE)]
        assert [part.number for part in self.inner.started] == [1, 2]

    def test_what_ends_after_it_was_closed_reaches_nobody(self):
        target, _, _ = self.order(4)
        self.end(0)
        self.fetcher.close()
        assert self.inner.is_closed and self.written(target) == [1, 0, 0, 0]
        self.end(1)
        assert self.written(target) == [1, 0, 0, 0] and not self.thread.over
        assert self.stages._free.qsize() == 3

    def test_orders_longer_than_a_stage_come_from_memory_of_the_host(self):
        nbytes = 7 * STAGE_NBYTES + 5
        source, target, here = Buffer(nbytes, seed=1), SealedBuffer(nbytes), Memory()
        here.register(source.address, nbytes)
        self.memory.register(target.address, nbytes)
        grant = self.memory.grant(int64(target.address), int64(nbytes))
        with LongQueueTransport(here) as sender, StagedQueueTransport(self.memory) as receiver:
            here.follow(sender)
            self.memory.follow(receiver)
            peer = sender.connect(receiver.listen(), deadline_s=DEADLINE_S)
            write = peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=DEADLINE_S)
            assert outcome_of(write).ok and np.array_equal(target.bytes, source.bytes)
