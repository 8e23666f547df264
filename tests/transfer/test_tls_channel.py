"""What a channel with TLS moves in one call, and what holds of its connection whichever way it is called."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from certificates import CAN_MAKE, make_certificate
from late_calls import make_late

from transfer.transports import records, tls
from transfer.transports.tls import Tls, TlsChannel
from transfer.transports.vectors import Small, Vector

pytestmark = pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")

MIB = 1 << 20
WAITS_LONG = struct.pack("ll", 120, 0)
Pair = tuple[TlsChannel, TlsChannel]


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> list[ssl.SSLContext]:
    files = Tls(**make_certificate(tmp_path_factory.mktemp("tls")))
    return [files.context(server=is_server) for is_server in (False, True)]


@pytest.fixture
def make(contexts: list[ssl.SSLContext]) -> Iterator[Callable[[], Pair]]:
    """Makes both ends of a connection past its handshake, over sockets that hold little."""
    opened: list[TlsChannel] = []

    def pair() -> Pair:
        client, server = socket.socketpair()
        for end in (client, server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        there = TlsChannel.accepted(server, contexts[1])
        shaking = threading.Thread(target=until_done, args=(there.handshake,))
        shaking.start()
        here = TlsChannel.connected(client, contexts[0])
        shaking.join()
        for end in (here, there):
            opened.append(end)
            end.hurry()
        return here, there

    yield pair
    for end in opened:
        end.close()


def until_done(call: Callable[[], object]) -> None:
    while True:
        try:
            call()
        except BlockingIOError:
            time.sleep(0.001)
        else:
            return


def moved(call: Callable[[Vector], int], vector: Vector) -> None:
    """All of it, in as many calls as it takes."""
    while vector.left:
        until_done(lambda: call(vector))


def over(data: np.ndarray, sizes: list[int]) -> Vector:
    """`data` must live as long as this is used."""
    ends = np.cumsum(sizes)
    return Vector.of((data.ctypes.data + ends - sizes).tolist(), sizes)


def cut(total: int, seed: int) -> list[int]:
    """Into pieces of a byte to a MiB, many of them near the size of a record."""
    rng, sizes = np.random.default_rng(seed), []
    while (left := total - sum(sizes)) > 0:
        size = int(rng.choice([1, 248, 4097, 16383, 16384, 16385, 32768, 65535, 65537, MIB])) + int(rng.integers(3))
        sizes.append(min(size, left))
    return sizes


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("record_by_record", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("total", [1, 16384, 65537, 5 * MIB + 77])
def test_pieces_of_all_sizes_arrive_from_and_in_such(make, monkeypatch, total, record_by_record, is_late):
    """With short turns and long ones, and where OpenSSL cannot be reached at an end, or at both."""
    if is_late:
        make_late(monkeypatch)
    ends = make()
    assert all(end._records for end in ends)
    for number in record_by_record:
        ends[number]._records = None
    source = np.random.default_rng(1).integers(0, 256, total, dtype=np.uint8)
    target = np.zeros(total, dtype=np.uint8)
    vector, into = over(source, cut(total, seed=2)), over(target, cut(total, seed=3))
    sending = threading.Thread(target=moved, args=(ends[0].send_vector, vector))
    sending.start()
    moved(ends[1].fill_vector, into)
    sending.join()
    assert (source == target).all()


@pytest.mark.parametrize("piece_nbytes", [3000, 20000, 32 << 10, MIB - 248])
def test_a_socket_that_is_full_at_any_point_breaks_nothing(make, piece_nbytes):
    """OpenSSL has made a record of what comes next by then, and wants to see no less of it again."""
    here, there = make()
    for total in (*range(66_000, 200_000, 7001), MIB + 66_000, 2 * MIB + 100_000):
        source = np.random.default_rng(total).integers(0, 256, total, dtype=np.uint8)
        target = np.zeros(total, dtype=np.uint8)
        sizes = [248, *[piece_nbytes] * (total // piece_nbytes)]
        while sum(sizes) > total:
            sizes.pop()
        vector = over(source, [*sizes, total - sum(sizes)])
        read = 0
        while read < total:
            with suppress(BlockingIOError):
                if vector.left:
                    here.send_vector(vector)
            nbytes = min(10_000, total - read)
            part = Vector.of([target.ctypes.data + read], [nbytes])
            with suppress(BlockingIOError):
                read += there.fill_vector(part)
        assert not vector.left and (source == target).all()


def test_after_a_late_call_one_call_moves_many_records(make, monkeypatch):
    make_late(monkeypatch)
    monkeypatch.setattr(tls, "_WAIT_TIMEVAL", WAITS_LONG)
    here, there = make()
    source, target = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8), np.zeros(4 * MIB, np.uint8)
    vector, into = over(source, [32 << 10] * 128), over(target, [MIB] * 4)
    first = here.send_vector(vector)
    assert 0 < first < MIB, "what the socket takes"
    assert there.fill_vector(into) == first
    assert here.waits and there.waits
    sending = threading.Thread(target=here.send_vector, args=(vector,))
    sending.start()
    assert first + there.fill_vector(into) == 4 * MIB
    sending.join(60)
    assert not vector.left and (source == target).all()


def test_a_call_that_waited_too_long_is_followed_by_shorter_ones(make, monkeypatch):
    """A grant's end waits for a call, each record of which may take as long as a socket waits."""
    make_late(monkeypatch)
    monkeypatch.setattr(tls, "_LONG_S", -1.0)
    here, there = make()
    target = np.zeros(16 * MIB, np.uint8)
    for nbytes in (8 * MIB, 4 * MIB, 2 * MIB, MIB, MIB):
        assert there._long_nbytes == nbytes
        there._waiting_calls = 32
        here.send(b"some")
        assert there.fill_vector(over(target, [16 * MIB])) == 4
    monkeypatch.setattr(tls, "_LONG_S", 1e9)
    here.send(b"some")
    assert there.fill_vector(over(target, [16 * MIB])) == 4
    assert there._long_nbytes == 2 * MIB


def test_little_never_waits_and_says_what_is_there(make, monkeypatch):
    make_late(monkeypatch)
    monkeypatch.setattr(tls, "_WAIT_TIMEVAL", WAITS_LONG)
    here, there = make()
    small = Small(100)
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            there.fill(small)
        with pytest.raises(BlockingIOError):
            there.fill_vector(over(np.zeros(1 << 15, np.uint8), [1 << 15]))
    assert not there.pending
    assert here.send(bytes(range(120))) == 120
    until_done(lambda: there.fill(small, 10))
    assert there.pending and small.bytes[10:].tolist() == list(range(90))
    assert there.fill(small) == 30 and not there.pending


@pytest.mark.parametrize("nbytes", [100, MIB])
def test_the_end_and_a_broken_record_are_errors_of_that_connection(make, nbytes):
    target = np.zeros(nbytes, np.uint8)
    here, there = make()
    here.close()
    assert there.fill_vector(over(target, [nbytes])) == 0
    here, there = make()
    os.write(here.descriptor, b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError, match="record"):
        there.fill_vector(over(target, [nbytes]))
    assert there.fill_vector(over(target, [nbytes])) == 0


def test_a_closed_connection_is_not_used_and_writes_nothing_to_what_has_its_descriptor_next(make):
    here, _ = make()
    freed = []
    weakref.finalize(here._records, freed.append, True)
    number = here.descriptor
    near, far = socket.socketpair()
    with near, far:
        here.close()
        os.dup2(near.fileno(), number)
        try:
            for call in (lambda: here.send(b"late"), lambda: here.send_vector(over(np.zeros(MIB, np.uint8), [MIB]))):
                with pytest.raises(OSError):
                    call()
            gc.collect()
            assert freed
            far.setblocking(False)
            with pytest.raises(BlockingIOError):
                far.recv(100)
        finally:
            os.close(number)


class _Connection:
    """What `Records` looks at of one."""

    def __init__(self, made: object, context: ssl.SSLContext) -> None:
        self._sslobj, self.context = made, context


class _Larger:
    __slots__ = tuple(f"slot_{number}" for number in range(8))


def test_what_is_laid_out_otherwise_is_left_alone(make):
    """The SSL of a connection is taken from between two pointers that are known."""
    here, _ = make()
    context, made = here._tls.context, here._tls._sslobj
    assert records._pointer(here._tls)
    for other in (object(), _Larger(), made):
        assert records._pointer(_Connection(other, context)) is None


def test_without_its_library_there_are_no_long_calls(make, monkeypatch):
    monkeypatch.setattr(records, "_openssl", lambda: None)
    here, there = make()
    assert here._records is there._records is None
    assert here.send(b"some") == 4
    small = Small(4)
    until_done(lambda: there.fill(small))
    assert small.bytes.tobytes() == b"some" and not there.pending
