"""A library that reads into staging: what it does late reaches nobody's memory."""

import ctypes
import os
import queue
import threading
from pathlib import Path

import pytest
from simulated.library import Gate, MemoryReader, SimulatedTransport
from simulated.waiting import wait_for

import transfer.control.handshake
from transfer.testing.conformance import TransportConformance
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, TransferError
from transfer.transports.libraries import staging
from transfer.transports.libraries.staging import NUM_WORKERS, SLOT_NBYTES, Slot, StagedFetcher, Staging
from transfer.transports.memory import Memory
from transfer.transports.pull import Fetch
from transfer.transports.vectors import Pieces
from transfer.transports.wire import CopyStatus

TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def found_by_other_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)


class TestStaged(TransportConformance):
    transport = SimulatedTransport

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds


@pytest.fixture
def pair():
    """A sender with a source, and a receiver with a target, of three slots."""
    nbytes = 3 * SLOT_NBYTES
    with Pair(nbytes) as made:
        yield made


class Pair:
    def __init__(self, nbytes):
        self.here, self.there = Memory(), Memory()
        self.source, self.target = Buffer(nbytes, seed=1), Buffer(nbytes)
        self.here.register(self.source.address, nbytes)
        self.there.register(self.target.address, nbytes)
        self.sender, self.receiver = SimulatedTransport(self.here), SimulatedTransport(self.there)
        self.here.follow(self.sender)
        self.there.follow(self.receiver)
        self.peer = self.sender.connect(self.receiver.listen(), deadline_s=60)
        self.grant = self.there.grant(int64(self.target.address), int64(nbytes))

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.sender.close()
        self.receiver.close()

    def write(self):
        place = int64(self.source.address), self.grant.addresses, self.grant.nbytes
        return self.peer.write(self.grant, *place, deadline_s=120)


def test_a_grant_ends_while_the_library_reads_and_what_it_writes_then_reaches_nobody(pair):
    gate = pair.receiver.library.before = Gate()
    write = pair.write()
    assert gate.reached.acquire(timeout=120)
    pair.there.revoke(pair.grant)
    pair.target.bytes[:] = 7
    gate.open()
    assert outcome_of(write).cause is Cause.REFUSED
    assert (pair.target.bytes == 7).all()


def test_closing_does_not_wait_for_the_library(pair):
    gate = pair.receiver.library.before = Gate()
    write = pair.write()
    assert gate.reached.acquire(timeout=120)
    pair.receiver.close()
    assert pair.receiver.library.is_closed
    pair.target.bytes[:] = 7
    gate.open()
    assert outcome_of(write).cause is Cause.PEER_LOST
    wait_for(lambda: not pair.receiver.library.met)
    assert (pair.target.bytes == 7).all()


def test_staging_of_a_read_that_failed_is_never_used_again(pair):
    library = pair.receiver.library

    def fail():
        raise TransferError("the library gave up")

    assert outcome_of(pair.write()).ok
    library.before = fail
    assert outcome_of(pair.write()).cause is Cause.SOURCE
    wait_for(lambda: len(pair.receiver._staging._condemned) >= 1)
    library.before = lambda: None
    pair.target.bytes[:] = 0
    assert outcome_of(pair.write()).ok and (pair.target.bytes == pair.source.bytes).all()
    condemned = {slot.address for slot in pair.receiver._staging._condemned}
    assert condemned
    free = pair.receiver._staging._free
    assert not condemned & {free.get_nowait().address for _ in range(free.qsize())}


def test_staging_is_used_again_and_takes_no_more_than_what_is_under_way(pair):
    for _ in range(10):
        assert outcome_of(pair.write()).ok
    assert 1 <= len(pair.receiver.library.staged) <= NUM_WORKERS


def test_a_defect_of_the_library_fails_the_write_with_one_line_and_the_connection_goes_on(pair, caplog):
    pair.receiver.library.before = lambda: 1 // 0
    for _ in range(2):
        assert outcome_of(pair.write()).cause is Cause.SOURCE
    wait_for(lambda: caplog.records)  # of the thread that failed first, whose order need not be answered first
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["simulated_library"]
    pair.receiver.library.before = lambda: None
    assert outcome_of(pair.write()).ok


def test_a_condemned_slot_gives_its_pages_back():
    slot = Slot(MemoryReader())
    ctypes.memset(slot.address, 7, SLOT_NBYTES)
    slot.condemn()
    assert not any(ctypes.string_at(slot.address, SLOT_NBYTES))


def test_peers_that_are_gone_are_parted_from(pair):
    assert outcome_of(pair.write()).ok
    assert len(pair.receiver.library.met) == 1
    pair.peer.close()
    wait_for(lambda: not pair.receiver.library.met)
    assert pair.receiver.library.offered == pair.there.regions


@pytest.mark.parametrize("version", [8, transfer.control.handshake.VERSION])
def test_an_order_is_longer_than_a_slot_where_the_peer_takes_such(monkeypatch, version):
    monkeypatch.setattr(transfer.control.handshake, "VERSION", version)
    start, sizes = StagedFetcher.start, []
    monkeypatch.setattr(
        StagedFetcher, "start", lambda self, fetch: (sizes.append(fetch.pieces.total), start(self, fetch))[1]
    )
    with Pair(3 * SLOT_NBYTES) as pair:
        assert outcome_of(pair.write()).ok and (pair.target.bytes == pair.source.bytes).all()
    assert sizes == ([SLOT_NBYTES] * 3 if version == 8 else [3 * SLOT_NBYTES])


class Peer:
    """What fetches of one peer answer, and memory that they are between."""

    def __init__(self, nbytes):
        self.source, self.target, self.memory, self.reader = Buffer(nbytes, 1), Buffer(nbytes), Memory(), MemoryReader()
        self.memory.register(self.target.address, nbytes)
        self.grant = self.memory.grant(int64(self.target.address), int64(nbytes))
        self.fetcher = StagedFetcher("simulated_library", self.reader, Staging(self.reader))
        self.answers = queue.SimpleQueue()

    def ask(self, number, start, end):
        pieces = Pieces([self.source.address + start], [self.target.address + start], [end - start], end - start)
        held = self.memory.granted(self.grant.key)
        assert self.fetcher.start(Fetch(number, pieces, self.reader.origin(), held, self)) is None

    def post(self, work):
        work()

    def finish(self, fetch, status):
        self.answers.put((fetch.number, status))

    def answer(self):
        return self.answers.get(timeout=120)


@pytest.fixture
def peer():
    made = Peer(8 * SLOT_NBYTES)
    yield made
    made.fetcher.close()
    wait_for(lambda: not made.reader.met)


def test_an_order_behind_a_long_one_has_its_turn(peer):
    gate = peer.reader.before = Gate()
    peer.ask(1, 0, 8 * SLOT_NBYTES - 1)
    for _ in range(NUM_WORKERS):
        assert gate.reached.acquire(timeout=120)
    peer.ask(2, 8 * SLOT_NBYTES - 1, 8 * SLOT_NBYTES)
    gate.open()
    assert [peer.answer(), peer.answer()] == [(2, CopyStatus.OK), (1, CopyStatus.OK)]
    assert (peer.target.bytes == peer.source.bytes).all()


def test_both_workers_have_a_share_of_an_order_of_one_slot(peer):
    gate = peer.reader.before = Gate()
    peer.ask(1, 0, SLOT_NBYTES)
    for _ in range(NUM_WORKERS):
        assert gate.reached.acquire(timeout=120)
    gate.open()
    assert peer.answer() == (1, CopyStatus.OK)
    assert (peer.target.bytes[:SLOT_NBYTES] == peer.source.bytes[:SLOT_NBYTES]).all()


def test_where_a_part_of_an_order_fails_no_more_of_it_is_read_and_it_is_answered_once(peer):
    reads = []

    def fail():
        reads.append(1)
        raise TransferError("the library gave up")

    peer.reader.before = fail
    peer.ask(1, 0, 8 * SLOT_NBYTES)
    assert peer.answer() == (1, CopyStatus.UNREADABLE)
    assert 1 <= len(reads) <= NUM_WORKERS
    peer.reader.before = lambda: None
    peer.ask(2, 0, SLOT_NBYTES)
    assert peer.answer() == (2, CopyStatus.OK) and peer.answers.empty()


@pytest.mark.parametrize("end", ["revoke", "close"])
def test_both_workers_copy_at_once_and_whoever_ends_that_waits_for_both(peer, monkeypatch, end):
    gate, copy, copied = Gate(), staging.copy_out, []

    def copy_late(*arguments):
        gate()
        copy(*arguments)
        copied.append(1)

    monkeypatch.setattr(staging, "copy_out", copy_late)
    peer.ask(1, 0, 8 * SLOT_NBYTES)
    for _ in range(NUM_WORKERS):
        assert gate.reached.acquire(timeout=120)
    ended = []

    def finish():
        peer.fetcher.close() if end == "close" else peer.memory.revoke(peer.grant)
        ended.append(len(copied))
        peer.target.bytes[:] = 7

    ending = threading.Thread(target=finish)
    ending.start()
    if end == "close":
        wait_for(lambda: peer.fetcher._is_closed)
    else:
        wait_for(lambda: peer.memory.granted(peer.grant.key).revoked)
    gate.open()
    ending.join(120)
    assert ended == [NUM_WORKERS]
    wait_for(lambda: end == "close" or not peer.answers.empty())
    assert (peer.target.bytes == 7).all() and len(copied) == NUM_WORKERS
