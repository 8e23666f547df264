"""A library that reads into staging: what it does late reaches nobody's memory."""

import os
from pathlib import Path

import pytest
from simulated.library import Gate, SimulatedTransport
from simulated.waiting import wait_for

from transfer.testing.conformance import TransportConformance
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause, TransferError
from transfer.transports.libraries.staging import NUM_WORKERS, SLOT_NBYTES
from transfer.transports.memory import Memory

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
    """A sender with a source, and a receiver with a target, of three orders."""
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


def test_peers_that_are_gone_are_parted_from(pair):
    assert outcome_of(pair.write()).ok
    assert len(pair.receiver.library.met) == 1
    pair.peer.close()
    wait_for(lambda: not pair.receiver.library.met)
    assert pair.receiver.library.offered == pair.there.regions
