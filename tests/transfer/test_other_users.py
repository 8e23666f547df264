"""Other users of the host: they get nowhere at our Unix sockets, and are not believed at theirs."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from contextlib import suppress

import pytest
from simulated.waiting import wait_for

from transfer.transports import unix

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: to become another user needs root")


@needs_root
def test_another_user_is_turned_away_before_he_has_said_anything(pair, caplog):
    """Also one who floods: he takes no place at all."""
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            ctypes.CDLL(None).setuid(NOBODY)
            for port in pair.ports.values():
                for _ in range(100):
                    with socket.socket(socket.AF_UNIX) as connection:
                        connection.settimeout(20)
                        connection.connect(f"\0mooncake-connector/0/{port}".encode())
                        with suppress(ConnectionError):
                            assert connection.recv(1) == b""
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.serves()
    wait_for(lambda: f"the other end belongs to user {NOBODY}" in caplog.text)


@needs_root
def test_a_name_that_another_user_took_is_not_believed():
    """He listens at the name of a port of ours: nobody tells him anything."""
    ready, done = os.pipe(), os.pipe()
    port = 1023
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            name = unix.port_name(port)
            ctypes.CDLL(None).setuid(NOBODY)
            with unix.listen_at(name, 8):
                os.write(ready[1], b"x")
                os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with socket.socket(socket.AF_UNIX) as connection, pytest.raises(unix.OtherUser, match=f"user {NOBODY}"):
            unix.reach(connection, unix.port_name(port), time.monotonic() + 20)
        with pytest.raises(OSError, match="already in use"):
            unix.listen_at_port(port, 8)
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *done):
            os.close(end)


def test_a_user_that_stands_for_every_unknown_one_is_refused(monkeypatch):
    monkeypatch.setattr(unix, "_unknown_user", os.geteuid)
    one, other = socket.socketpair()
    with one, other:
        unix.check_user(one)  # all users have a number here
        monkeypatch.setattr(unix, "_knows_every_user", lambda: False)
        with pytest.raises(unix.OtherUser, match="stands for every user it does not know: run as another user"):
            unix.check_user(one)


def test_two_users_may_have_the_same_port(monkeypatch):
    first, port = unix.listen_at_port(0, 1)
    with first:
        with pytest.raises(OSError, match="already in use"):
            unix.listen_at_port(port, 1)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        unix.listen_at_port(port, 1)[0].close()
