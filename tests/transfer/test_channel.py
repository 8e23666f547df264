"""What a channel's calls move beside a busy Python thread: see `channel.Channel`."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from transfer.transports import channel
from transfer.transports.channel import Channel
from transfer.transports.vectors import Vector

NBYTES = 4 << 20
LONG = struct.pack("ll", 120, 0)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Channel, socket.socket]]:
    """Every call that does not wait is late, so every second one with much to move waits."""
    monkeypatch.setattr(channel, "_LATE_S", -1.0)
    here, there = socket.socketpair()
    with here, there:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        yield Channel(here), there


def over(data: np.ndarray) -> Vector:
    """In pieces of 4 KiB; `data` must live as long as this is used."""
    return Vector.of(list(range(data.ctypes.data, data.ctypes.data + NBYTES, 4096)), [4096] * (NBYTES // 4096))


def in_drops(there: socket.socket, data: bytes) -> threading.Thread:
    def send() -> None:
        for start in range(0, len(data), NBYTES // 8):
            time.sleep(0.02)
            there.sendall(data[start : start + NBYTES // 8])

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_the_call_after_a_late_one_gets_all_that_is_coming(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_WAIT_TIMEVAL", LONG)
    here, there = ends
    here.hurry()
    data, target = np.random.default_rng(1).bytes(NBYTES), np.zeros(NBYTES, dtype=np.uint8)
    vector = over(target)
    with pytest.raises(BlockingIOError):
        here.fill_vector(vector)
    assert here.waits
    sender = in_drops(there, data)
    assert here.fill_vector(vector) == NBYTES, "in one call, though a socket holds 64 KiB"
    sender.join(60)
    assert target.tobytes() == data


def test_and_gives_all_that_there_is(
    ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_WAIT_TIMEVAL", LONG)
    here, there = ends
    here.hurry()
    source = np.frombuffer(np.random.default_rng(2).bytes(NBYTES), dtype=np.uint8)
    vector = over(source)
    first = here.send_vector(vector)
    assert 0 < first < NBYTES, "what the socket takes"
    got = bytearray()

    def read() -> None:
        while len(got) < NBYTES:
            got.extend(there.recv(1 << 16))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert first + here.send_vector(vector) == NBYTES
    reader.join(60)
    assert got == source.tobytes()


def test_waiting_ends_by_itself(ends: tuple[Channel, socket.socket]) -> None:
    here, there = ends
    here.hurry()
    target = np.zeros(NBYTES, dtype=np.uint8)
    vector = over(target)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            here.fill_vector(vector)
    there.sendall(b"some")
    assert here.fill_vector(vector) == 4
    there.close()
    assert here.fill_vector(vector) == 0


def test_a_signal_breaks_nothing_off(ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is for the process may come to any thread."""
    monkeypatch.setattr(channel, "_WAIT_TIMEVAL", LONG)
    here, _ = ends
    here.hurry()
    target = np.zeros(NBYTES, dtype=np.uint8)
    vector = over(target)
    with pytest.raises(BlockingIOError):
        here.fill_vector(vector)
    over_ = threading.Event()

    def disturb() -> None:
        while not over_.wait(0.02):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        with pytest.raises(BlockingIOError):
            here.fill_vector(vector)
    finally:
        over_.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_little_never_waits(ends: tuple[Channel, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_WAIT_TIMEVAL", LONG)
    here, _ = ends
    here.hurry()
    target = np.zeros(1 << 16, dtype=np.uint8)
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            here.fill_vector(Vector.of([target.ctypes.data], [target.nbytes]))
    with pytest.raises(BlockingIOError):
        here.recv(100)
