"""What unknown and broken peers can do to a listening transport: nothing but lose their own connection."""

import gc
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.raw_peer import is_closed
from simulated.waiting import wait_for

from transfer.control import pending
from transfer.control.handshake import Client, Identity, shake
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports import cma, incoming, local, network, receiver, shm, tcp
from transfer.transports.base import Cause, Completion, Grant, Outcome, TransferError, Unavailable
from transfer.transports.channel import Channel
from transfer.transports.memory import Memory
from transfer.transports.stream import Slice, WriteRequest
from transfer.transports.vectors import Pieces
from transfer.transports.wire import ANSWER_NBYTES, PROBE_KEY, CopyOrder, CopyStatus, WireError, decode_answer

pytestmark = pytest.mark.slow

SECRET = b"sixteen bytes or more"
KINDS = (cma.CmaTransport, shm.ShmTransport, tcp.TcpTransport)
NBYTES = 1 << 16


class Listening:
    """A transport with one grant, and a way to talk to it byte by byte."""

    def __init__(self, kind, secret=SECRET):
        self.identity = Identity(secret)
        self.memory, self.kind = Memory(), kind
        self.target = Buffer(NBYTES)
        self.memory.register(self.target.address, NBYTES)
        self.grant = self.memory.grant(int64(self.target.address), int64(NBYTES // 2))
        self.transport = kind(self.memory, self.identity)
        self.endpoint = self.transport.listen()

    def dial(self):
        """A connection that has said nothing yet."""
        if self.kind is tcp.TcpTransport:
            connection = socket.create_connection(network.decode_endpoint(self.endpoint).addresses[0])
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(local.decode_endpoint(self.endpoint).address)
        connection.settimeout(30)
        return closing(connection)

    @contextmanager
    def greeted(self):
        """A connection after its handshake, and after the ring where there is one."""
        with self.dial() as connection:
            shake(connection, Client(self.identity, self.kind.name), time.monotonic() + 30)
            connection.settimeout(30)
            if self.kind is shm.ShmTransport:
                ring = shm._Ring()
                ring.hand_over(Channel(connection), time.monotonic() + 30)
            yield connection

    def still_serves(self):
        """A proper peer gets its bytes through."""
        memory, source = Memory(), Buffer(NBYTES // 2, seed=1)
        memory.register(source.address, source.nbytes)
        with self.kind(memory, self.identity) as sender:
            peer = sender.connect(self.endpoint, deadline_s=30)
            whole = int64(source.address), self.grant.addresses, self.grant.nbytes
            assert outcome_of(peer.write(self.grant, *whole, deadline_s=30)).ok
        assert np.array_equal(self.target.bytes[: NBYTES // 2], source.bytes)
        self.target.bytes[:] = 0


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def listening(request):
    made = Listening(request.param)
    yield made
    made.transport.close()


@settings(max_examples=40)
@given(st.binary(max_size=200))
def test_an_unknown_peer_that_says_anything_gets_nowhere(listening, data):
    with listening.dial() as connection:
        connection.sendall(data)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    assert not listening.target.bytes.any()


def orders(listening):
    address, columns = listening.target.address, 3 if listening.kind is cma.CmaTransport else 2
    key = st.sampled_from([listening.grant.key, bytes(16), b"k" * 16])
    ring = shm.SLOT_NBYTES * shm.NUM_SLOTS
    place = st.sampled_from([0, 1, ring - 1, ring, 2**63, 2**64 - 1])
    number = st.integers(0, 2**64 - 1)
    value = st.sampled_from([0, 1, 100, NBYTES // 2, NBYTES, 2**31, 2**62, -1]) | st.integers(0, 3 * NBYTES).map(
        lambda offset: address + NBYTES // 2 + offset
    )
    pieces = st.integers(1, 4)

    @st.composite
    def order(draw):
        count = draw(pieces)
        rows = [int64(*(draw(value) for _ in range(count))) for _ in range(columns)]
        total = draw(st.sampled_from([int(rows[1].sum()), 100, 2**40, 2**64 - 1])) % 2**64
        return CopyOrder(draw(number), draw(key), draw(st.sampled_from([count, 0, 2**31])), total, draw(place)).encode(
            *rows
        )

    return order()


@settings(max_examples=60)
@given(st.data())
def test_a_peer_with_the_secret_that_orders_anything_writes_outside_of_no_grant(listening, data):
    outside = listening.target.bytes[NBYTES // 2 :]
    with listening.greeted() as connection:
        for order in data.draw(st.lists(orders(listening), min_size=1, max_size=4)):
            with suppress(OSError):
                connection.sendall(bytes(order) + data.draw(st.binary(max_size=300)))
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
    assert not outside.any()


def test_a_listener_serves_on_after_all_that(listening):
    for noise in (b"", b"\xff" * 64, b"\x00" * 64):
        with listening.dial() as connection:
            connection.sendall(noise)
    with listening.greeted() as connection:
        connection.sendall(b"\x00" * 4096)
        assert is_closed(connection)
    listening.still_serves()


@pytest.mark.parametrize("kind", KINDS)
def test_beyond_a_number_of_pending_handshakes_the_oldest_goes(kind, monkeypatch):
    monkeypatch.setattr(pending, "MAX_FROM_ONE", 4)
    listening = Listening(kind)
    with listening.transport, ExitStack() as stack:
        first, second = ([stack.enter_context(listening.dial()) for _ in range(n)] for n in (2, 4))
        assert all(is_closed(connection) for connection in first)
        for connection in second:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def drop(monkeypatch, times):
    """So many connections are closed during their handshake, as if many others had come; returns which were."""
    shake_hands, dropped = incoming.Connection._shake, []

    def crowded(self):
        if len(dropped) == times:
            return shake_hands(self)
        dropped.append(self)
        if len(dropped) % 2:  # what was not read makes the end a reset
            self.read(4096)
        raise TransferError(pending.TOO_MANY)

    monkeypatch.setattr(incoming.Connection, "_shake", crowded)
    return dropped


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_is_dropped_during_its_handshake_tries_again(kind, monkeypatch):
    dropped = drop(monkeypatch, times=5)
    listening = Listening(kind)
    with listening.transport:
        listening.still_serves()
    assert len(dropped) == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("deadline_s, attempts", [(30, 6), (0.04, 1)])
def test_a_peer_that_is_always_dropped_gives_up(kind, deadline_s, attempts, monkeypatch):
    dropped = drop(monkeypatch, times=1000)
    listening, open_files = Listening(kind), len(os.listdir("/proc/self/fd"))
    with listening.transport, kind(Memory(), listening.identity) as sender:
        with pytest.raises(Unavailable):
            sender.connect(listening.endpoint, deadline_s=deadline_s)
        assert len(dropped) <= attempts
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= open_files)


def test_pending_handshakes_are_given_up_after_a_time(monkeypatch):
    monkeypatch.setattr(receiver, "HANDSHAKE_S", 0.2)
    listening = Listening(cma.CmaTransport)
    with listening.transport:
        with listening.dial() as connection:
            assert is_closed(connection)
        monkeypatch.undo()  # what serves may be slow as well
        listening.still_serves()


def test_whatever_unknown_peers_say_makes_few_lines_in_the_log(caplog):
    listening = Listening(tcp.TcpTransport)
    with listening.transport:
        for length in range(2000, 2060):
            with listening.dial() as connection:
                connection.sendall(length.to_bytes(4, "little"))
                assert is_closed(connection)
    assert len(caplog.records) == 1


def test_a_defect_costs_one_connection_and_is_logged(monkeypatch, caplog):
    listening = Listening(cma.CmaTransport)
    with listening.transport:
        monkeypatch.setattr(cma._MemoryReader, "probe", lambda *_: 1 / 0)
        with pytest.raises(Unavailable):
            listening.still_serves()
        monkeypatch.undo()
        listening.still_serves()
    assert "ZeroDivisionError" in caplog.text


def test_a_ring_that_could_shrink_is_refused():
    listening = Listening(shm.ShmTransport)
    with listening.transport, listening.dial() as connection:
        shake(connection, Client(listening.identity, "shm"), time.monotonic() + 30)
        connection.settimeout(30)
        file = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, shm.SLOT_NBYTES * shm.NUM_SLOTS)
        socket.send_fds(connection, [b"ring"], [file])
        os.close(file)
        assert is_closed(connection)


def test_a_peer_that_cannot_map_the_ring_is_not_reached_over_shm(monkeypatch):
    """It is out of memory or of descriptors: another transport has to be found, not to fail at each write."""

    def refuse(_):
        raise WireError("ring that cannot be mapped: the test forbids it")

    listening = Listening(shm.ShmTransport)
    monkeypatch.setattr(shm, "_map_ring", refuse)
    sender = shm.ShmTransport(Memory(), listening.identity)
    with listening.transport, sender, pytest.raises(Unavailable, match="closed the connection when asked to read"):
        sender.connect(listening.endpoint, deadline_s=30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_for_which_there_is_no_thread_is_unavailable_and_leaves_nothing_open(kind, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    listening = Listening(kind)
    with listening.transport, kind(Memory(), listening.identity) as sender:
        sender.connect(listening.endpoint, deadline_s=30).close()
        open_files = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(Unavailable, match="can't start new thread"):
                sender.connect(listening.endpoint, deadline_s=30)
        monkeypatch.undo()
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= open_files)  # until the receiver has closed its side


@pytest.mark.parametrize("kind", KINDS)
def test_a_listener_for_which_there_is_no_thread_is_an_error_and_leaves_nothing_open(kind, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with kind(Memory(), Identity(SECRET)) as transport:
        open_files = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(TransferError, match="can't start new thread"):
                transport.listen()
            assert len(os.listdir("/proc/self/fd")) <= open_files
        monkeypatch.undo()
        assert transport.listen()


def test_the_ring_of_a_closed_connection_is_unmapped_at_once():
    """Not when Python next looks for cycles, which is seldom in an engine."""

    def rings():
        return Path("/proc/self/maps").read_text().count("mooncake-connector-ring")

    listening, before = Listening(shm.ShmTransport), rings()
    gc.disable()
    try:
        with listening.transport:
            with listening.greeted():
                assert rings() == before + 2  # of the sender as well
            wait_for(lambda: rings() == before)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [cma.CmaTransport, shm.ShmTransport])
def test_more_peers_than_wait_in_the_backlog_are_accepted(kind, monkeypatch):
    """All ranks of an instance connect at once while the receiving thread copies."""
    accept, busy = receiver.Receiver._accept, threading.Event()

    def late(self, listener):
        busy.wait(30)
        accept(self, listener)

    monkeypatch.setattr(local, "_BACKLOG", 2)
    monkeypatch.setattr(receiver.Receiver, "_accept", late)
    listening = Listening(kind)
    with listening.transport, kind(Memory(), listening.identity) as sender, ThreadPoolExecutor(8) as callers:
        connecting = [callers.submit(sender.connect, listening.endpoint, deadline_s=30) for _ in range(8)]
        time.sleep(0.1)
        busy.set()
        assert all(each.result().alive for each in connecting)


@pytest.mark.parametrize("place", [shm.SLOT_NBYTES * shm.NUM_SLOTS - 50, 2**63, 2**64 - 1])
def test_an_order_that_reaches_beyond_the_ring_is_refused(place):
    listening = Listening(shm.ShmTransport)
    with listening.transport, listening.greeted() as connection:
        order = CopyOrder(1, listening.grant.key, 1, 100, place).encode(listening.grant.addresses, int64(100))
        connection.sendall(order)
        assert connection.recv(1) == b""
    assert not listening.target.bytes.any()


def test_a_receiver_that_reads_another_process_than_the_sender_says_so():
    """As where a PID means somebody else: the number that it finds is not the one that it was told."""
    listening, kept = Listening(cma.CmaTransport), np.array([5], dtype=np.uint64)
    address, size = int64(kept.ctypes.data), int64(8)
    with listening.transport, listening.greeted() as connection:
        for number, status in ((5, CopyStatus.OK), (6, CopyStatus.UNREADABLE)):
            connection.sendall(CopyOrder(1, PROBE_KEY, 1, 8, number).encode(address, size, address))
            assert decode_answer(connection.recv(ANSWER_NBYTES)) == (1, status)


def test_the_source_of_an_abandoned_write_is_not_copied_into_the_ring():
    pieces = Pieces.of(int64(4096), int64(1), int64(100))  # not mapped: reading it would end this process
    write = WriteRequest(pieces, Grant(bytes(16), int64(), int64()), Completion(0.0), 1000)
    write.completion.settle(Outcome(Cause.SOURCE))
    ring = shm._Ring()
    assert ring.encode(Slice(write, pieces)).left > 0
    ring.close()


@pytest.mark.parametrize("kind", [cma.CmaTransport, shm.ShmTransport])
def test_processes_of_another_user_are_turned_away_by_both_sides(kind, monkeypatch):
    listening = Listening(kind)
    with listening.transport, kind(Memory(), listening.identity) as sender:
        user = os.geteuid()
        here = threading.current_thread()
        for turned_away in (True, False):  # as seen by the one that connects, then by the one that accepts
            monkeypatch.setattr(
                os,
                "geteuid",
                lambda: user + ((threading.current_thread() is here) == turned_away),  # noqa: B023
            )
            with pytest.raises(Unavailable):
                sender.connect(listening.endpoint, deadline_s=30)
        monkeypatch.setattr(os, "geteuid", lambda: user)
        assert sender.connect(listening.endpoint, deadline_s=30).alive


@pytest.mark.parametrize(
    "host, refusal",
    [
        ("192.0.2.1", "no shared secret"),
        ("localhost", "literal IP address"),
        ("example.org", "literal IP address"),
        ("no address", "literal IP address"),
    ],
)
def test_tcp_connects_to_addresses_only_and_beyond_loopback_with_a_secret_only(host, refusal):
    endpoint = msgspec.msgpack.encode(network.NetworkEndpoint([(host, 9)], bytes(16)))
    with tcp.TcpTransport(Memory()) as transport, pytest.raises(Unavailable, match=refusal):
        transport.connect(endpoint, deadline_s=5)


@pytest.mark.parametrize(
    "secret, host, refusal",
    [(b"", "10.0.0.1", r"'10\.0\.0\.1' is not loopback and no"), (SECRET, "0.0.0.0", "name the addresses")],
)
def test_tcp_does_not_listen_everywhere_nor_beyond_loopback_without_a_secret(secret, host, refusal):
    with pytest.raises((TransferError, ValueError), match=refusal):
        tcp.TcpTransport(Memory(), Identity(secret), hosts=["127.0.0.1", host])
