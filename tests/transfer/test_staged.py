"""Memory of a device over `tcp`, `shm` and a library, through page-locked stages; over a stand-in for the driver.

The processor cannot touch the stand-in's device memory here: whatever does not go through the driver crashes.
"""

import time

import numpy as np
import pytest
from certificates import CAN_MAKE, tls_process
from long_form import LONG
from simulated.completion_queue import StagedQueueTransport
from simulated.cuda_driver import SealedBuffer, StagedShm, StagedTcp, fewer_pieces, fold_on_device
from simulated.library import StagedLibrary
from simulated.waiting import wait_for

from transfer.testing.conformance import TransportConformance
from transfer.testing.fixtures import DEADLINE_S, TransportFixtures
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause
from transfer.transports.cuda.stage import STAGE_NBYTES
from transfer.transports.memory import Memory
from transfer.transports.wire import ANSWER_NBYTES, CopyOrder, CopyStatus, decode_answer

pytestmark = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def certificate(files):
    with tls_process(files):
        yield files


class StagedConformance(TransportConformance):
    @pytest.mark.long
    def test_more_pieces_than_one_order_takes_arrive(self, memory, there, peer, monkeypatch):
        if not LONG:
            fewer_pieces(monkeypatch)
        super().test_more_pieces_than_one_order_takes_arrive(memory, there, peer)

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
        return {"tls": certificate, "lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds


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
