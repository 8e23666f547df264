"""The transports of host memory do what every transport must; and what only `cma` can get wrong."""

import ctypes
import mmap
import time
from types import SimpleNamespace

import pytest

from transfer.control import handshake
from transfer.testing.conformance import TransportConformance
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports import channel, cma, local
from transfer.transports.base import Cause
from transfer.transports.cma import CmaTransport
from transfer.transports.inline import InlineConnection
from transfer.transports.memory import Memory
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport
from transfer.transports.wire import CopyStatus

PROT_NONE, PROT_READ = 0, 1


class TestCma(TransportConformance):
    transport = CmaTransport


class TestShm(TransportConformance):
    transport = ShmTransport


class TestTcp(TransportConformance):
    transport = TcpTransport

    @pytest.fixture
    def options(self):
        return {"lost_after_s": 60.0}  # a busy machine may leave a thread waiting for seconds


class TestTcpBesideABusyThread(TestTcp):
    """As its calls are when each that does not wait comes back late."""

    test_a_piece_beyond_4_gib_arrives = None  # long, and no other than above

    @pytest.fixture(autouse=True)
    def late(self, monkeypatch):
        monkeypatch.setattr(channel, "_LATE_S", -1.0)
        monkeypatch.setattr(channel, "_MANY_NBYTES", 1)


@pytest.mark.parametrize(("version", "orders"), [(9, [32, 32, 32]), (handshake.VERSION, [96])])
def test_an_order_over_tcp_is_as_long_as_the_write_where_the_peer_takes_such(monkeypatch, version, orders):
    """Beside a busy Python thread each costs both ends 5 ms."""
    monkeypatch.setattr(handshake, "VERSION", version)
    execute, taken = InlineConnection.execute, []
    monkeypatch.setattr(
        InlineConnection,
        "execute",
        lambda self, order, *more: (taken.append(order.nbytes), execute(self, order, *more))[1],
    )
    memory, there, nbytes = Memory(), Memory(), 96 * MIB
    source, target = Buffer(nbytes, seed=1), Buffer(nbytes)
    memory.register(source.address, nbytes)
    there.register(target.address, nbytes)
    with TcpTransport(memory) as sender, TcpTransport(there) as receiver:
        peer = sender.connect(receiver.listen(), deadline_s=30)
        grant = there.grant(int64(target.address), int64(nbytes))
        assert outcome_of(peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=60)).ok
    assert taken == [MIB * order for order in orders]
    assert (target.bytes == source.bytes).all()


def test_a_batch_of_which_a_slice_failed_is_never_ok(monkeypatch):
    """Though the answer to its last slice comes before anybody was told of the failure."""
    monkeypatch.setattr(cma, "MAX_ORDER_NBYTES", MIB)
    memory, there = Memory(), Memory()
    source, target = mmap.mmap(-1, 2 * MIB), Buffer(2 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    memory.register(address, 2 * MIB)
    there.register(target.address, 2 * MIB)
    with CmaTransport(memory) as sender, CmaTransport(there) as receiver:
        peer = sender.connect(receiver.listen(), deadline_s=30)
        take = peer._take_answers

        def take_late(stream):
            time.sleep(0.2)
            take(stream)

        monkeypatch.setattr(peer, "_take_answers", take_late)
        grant = there.grant(int64(target.address), int64(2 * MIB))
        protect(address, MIB, PROT_NONE)
        try:
            outcome = outcome_of(peer.write(grant, int64(address), grant.addresses, grant.nbytes, deadline_s=30))
        finally:
            protect(address, MIB, PROT_READ)
    assert outcome.cause is Cause.SOURCE


def test_a_peer_that_answers_byte_by_byte_has_until_the_deadline_and_no_longer(monkeypatch):
    now_s, timeout_s = 0.0, float("inf")

    class Slow:
        def settimeout(self, seconds):
            nonlocal timeout_s
            timeout_s = seconds

        def recv(self, nbytes):
            nonlocal now_s
            now_s += 0.9 * timeout_s
            return b"\0"

    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: now_s))
    assert local.take_answer(Slow(), 10.0, "our memory")[1] is CopyStatus.OK
    assert now_s < 10.1
