"""What fetches bring lands in stages, and from there on the device; over fetches of which the test knows everything."""

import ctypes

import numpy as np
import pytest
from simulated.completion_queue import LongQueueTransport, StagedQueueTransport
from simulated.cuda_driver import SealedBuffer

from transfer.testing.fixtures import DEADLINE_S
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.fetched import LandingFetcher
from transfer.transports.cuda.stage import NUM_STAGES, STAGE_NBYTES, OnDevice, Stages
from transfer.transports.memory import Memory
from transfer.transports.pull import Fetch, Fetcher
from transfer.transports.vectors import Pieces
from transfer.transports.wire import CopyStatus

pytestmark = pytest.mark.usefixtures("library")


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
