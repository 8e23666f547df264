"""Writes from memory of a device go through stages, a part in each; over a wire of which the test knows everything."""

import ctypes
import time

import pytest
import xxhash
from simulated.cuda_driver import SealedBuffer, StagedTcp
from simulated.waiting import wait_for

from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import OK, Cause, Completion, Grant, Outcome, Peer, Unavailable
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.stage import MORE_STAGES, NUM_STAGES, STAGE_NBYTES, OnDevice, Stages
from transfer.transports.cuda.staged import StagedPeer
from transfer.transports.memory import Memory
from transfer.transports.passing import Mark, decode_mark
from transfer.transports.vectors import Pieces

pytestmark = pytest.mark.usefixtures("library")


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
