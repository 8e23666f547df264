"""The process that does TLS may be killed, stopped, overrun or never start."""

import itertools
import logging
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress

import msgspec
import pytest
from certificates import CAN_MAKE
from simulated.tls_process import Pair, helpers, running
from simulated.waiting import wait_for

from transfer.control.handshake import Identity
from transfer.testing.memory import MIB
from transfer.testing.waiting import outcome_of
from transfer.transports import tls as tls_
from transfer.transports import tls_relay
from transfer.transports.base import Cause, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.network import decode_endpoint
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

pytestmark = [
    pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`"),
    pytest.mark.usefixtures("anew"),
]


@pytest.mark.slow
@pytest.mark.parametrize("side, times", [("sender", 25), ("receiver", 8)])
def test_killed_at_any_moment_it_costs_its_streams_and_nothing_hangs(stack, files, side, times, monkeypatch):
    monkeypatch.setattr(tls_, "_LONGEST_PAUSE_S", 0.1)
    pair, outcomes = Pair(stack, files), []
    moments = random.Random(1)
    for _ in range(times):
        pair.connect()
        completion = pair.write()
        time.sleep(moments.random() * 0.15)
        found = helpers() if side == "sender" else helpers(pair.other.process.pid)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        outcome = outcome_of(completion)
        assert outcome.ok or outcome.cause is Cause.PEER_LOST, outcome
        wait_for(lambda: not pair.peer.alive)
        outcomes.append(outcome.cause)
    assert Cause.PEER_LOST in outcomes
    pair.connect()
    assert outcome_of(pair.write()).ok
    wait_for(lambda: len(helpers()) == 1)  # none is left that nobody has waited for


def test_its_end_is_counted_and_logged_once(stack, files, caplog):
    pair = Pair(stack, files)
    for _ in range(3):
        pair.connect()
        os.kill(running(), signal.SIGKILL)
        wait_for(lambda: not pair.peer.alive)
        assert outcome_of(pair.write()).cause is Cause.PEER_LOST
        wait_for(lambda: not helpers())
    wait_for(lambda: sum(tls_._process._ends.values()) == 3)
    assert [record.getMessage() for record in caplog.records].count(
        "the process that does TLS ended (signal 9): all connections with TLS are lost; the next one starts another"
    ) == 1
    with tls_._process._lock:
        assert pair.sender.take_counts() == {}, "an engine does not wait for who starts it again"
    assert pair.sender.take_counts() == {"tls_process_ends": {"signal 9": 3}} and pair.sender.take_counts() == {}


def test_its_end_is_the_reason_of_what_it_took_along_and_of_nothing_later(files):
    """Negative control: another connection, over the next one."""
    connections = [socket.socketpair() for _ in range(2)]
    lost = Tls(**files).secure(connections[0][0], server=True)
    os.kill(running(), signal.SIGKILL)
    assert lost.recv(1) == b""
    wait_for(lambda: not helpers() and tls_._process._control is None)
    later = Tls(**files).secure(connections[1][0], server=True)
    end = ConnectionResetError("closed by the peer")
    assert "the process that does TLS on this side has ended" in str(lost.why(end))
    assert later.why(end) is end and lost.why(ValueError("ours")).args == ("ours",)
    for channel, (_, far) in zip((lost, later), connections, strict=True):
        channel.close()
        far.close()
    assert not tls_._process._open


def test_one_that_ends_again_and_again_is_started_ever_more_rarely(monkeypatch, tmp_path, files):
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no OpenSSL here')")
    monkeypatch.setattr(tls_relay, "__file__", str(broken))
    process, started, begin = tls_._process, [], tls_.TlsProcess._begin
    monkeypatch.setattr(tls_.TlsProcess, "_begin", lambda self: started.append(1) or begin(self))
    monkeypatch.setattr(tls_, "_FIRST_PAUSE_S", 60.0)
    for _ in range(2):
        process.start()
        wait_for(lambda: sum(process._ends.values()) == len(started))
    for _ in range(3):
        with pytest.raises(Unavailable, match=r"ended \(status 1: no OpenSSL here\); it is started again in \d+\.\d s"):
            process.start()
    assert len(started) == 2, "the second one at once"


@pytest.mark.parametrize("executable", ["", None, "/nonexistent/python"])
def test_without_a_python_executable_it_is_unavailable_and_says_so(files, monkeypatch, executable):
    with TcpTransport(Memory(), tls=Tls(**files)) as there, TcpTransport(Memory(), tls=Tls(**files)) as sender:
        endpoint = there.listen()
        tls_._process._drop()
        monkeypatch.setattr(sys, "executable", executable)
        why = "nonexistent" if executable else "no Python executable is known"
        with pytest.raises(Unavailable, match=why):
            TcpTransport(Memory(), tls=Tls(**files)).listen()
        with pytest.raises(Unavailable, match=why):
            sender.connect(endpoint, deadline_s=10)


def test_a_stopped_one_is_waited_for_until_each_deadline(stack, files):
    """Of a write, of a connection, and of closing."""
    pair = Pair(stack, files)
    pair.connect()
    assert outcome_of(pair.write()).ok
    helper = running()
    os.kill(helper, signal.SIGSTOP)
    try:
        assert outcome_of(pair.write(deadline_s=0.5)).cause is Cause.DEADLINE
        with pytest.raises(Unavailable, match="timed out"):
            pair.sender.connect(pair.endpoint, deadline_s=0.5)
        with pytest.raises(Unavailable, match="takes nothing more"):
            for _ in range(2000):
                a, b = socket.socketpair()
                with a, b:
                    Tls(**files).secure(a, server=True).close()
        pair.sender.close()
    finally:
        os.kill(helper, signal.SIGCONT)


def test_where_it_has_no_descriptor_left_the_reason_is_told_and_others_go_on(stack, files):
    pair = Pair(stack, files)
    peer = pair.connect()
    helper = running()
    before = resource.prlimit(helper, resource.RLIMIT_NOFILE)
    in_use = set(map(int, os.listdir(f"/proc/{helper}/fd")))
    first_free = next(number for number in itertools.count() if number not in in_use)
    resource.prlimit(helper, resource.RLIMIT_NOFILE, (first_free, before[1]))
    with pytest.raises(Unavailable, match="no file descriptor is left to the process that does TLS"):
        pair.sender.connect(pair.endpoint, deadline_s=10)
    resource.prlimit(helper, resource.RLIMIT_NOFILE, before)
    assert peer.alive and outcome_of(pair.write()).ok and pair.sender.connect(pair.endpoint, deadline_s=60).alive


def test_where_the_engine_has_no_descriptor_left_it_is_unavailable_and_nothing_leaks(stack, files):
    pair = Pair(stack, files)
    pair.connect().close()
    wait_for(lambda: len(os.listdir(f"/proc/{running()}/fd")) <= 3)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    try:
        for left in range(5):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + left, most[1]))
            with suppress(Unavailable):
                pair.sender.connect(pair.endpoint, deadline_s=10).close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert pair.connect().alive


def test_many_connect_at_once(stack, files):
    pair = Pair(stack, files, nbytes=MIB)
    peers, failures = [], []

    def connect():
        try:
            peers.append(pair.sender.connect(pair.endpoint, deadline_s=60))
        except Unavailable as error:
            failures.append(error)

    threads = [threading.Thread(target=connect) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(peers) == 64 and len(helpers()) == 1
    for pair.peer in peers:
        assert outcome_of(pair.write()).ok
        pair.peer.close()
    wait_for(lambda: len(os.listdir(f"/proc/{running()}/fd")) <= 3 + 2)


@pytest.mark.parametrize("what", ["forged", "cut off"])
def test_a_forged_record_is_told_from_an_end_in_the_log(stack, files, caplog, what):
    there, tls = Memory(), Tls(**files)
    listener = stack.enter_context(TcpTransport(there, tls=tls))
    sender = stack.enter_context(TcpTransport(Memory(), tls=tls, streams=1))
    between = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    endpoint = decode_endpoint(listener.listen())
    sides = []

    def relay():
        here, _ = between.accept()
        far = socket.create_connection(endpoint.addresses[0])
        sides.extend([here, far])

        def back():
            with suppress(OSError):
                while data := far.recv(65536):
                    here.sendall(data)

        threading.Thread(target=back, daemon=True).start()
        with suppress(OSError):
            while data := here.recv(65536):
                far.sendall(data)

    threading.Thread(target=relay, daemon=True).start()
    moved = msgspec.structs.replace(endpoint, addresses=[between.getsockname()])
    peer = sender.connect(msgspec.msgpack.encode(moved), deadline_s=60)
    if what == "forged":
        sides[1].sendall(b"\x17\x03\x03\x00\x40" + bytes(64))
    else:
        sides[1].shutdown(socket.SHUT_WR)
    wait_for(lambda: not listener._receiver._connections)
    wait_for(lambda: not peer.alive)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("a connection was closed: SSLError:" in one and "MAC" in one.upper() for one in said) == (
        what == "forged"
    ), said


def test_strangers_leave_nothing_in_it(stack, files):
    """Random bytes, half a handshake, or nothing, and gone."""
    listener = stack.enter_context(TcpTransport(Memory(), tls=Tls(**files)))
    address = decode_endpoint(listener.listen()).addresses[0]
    made = random.Random(2)
    for number in range(60):
        with socket.create_connection(address) as stranger, suppress(OSError):
            stranger.sendall(made.randbytes(made.choice([0, 1, 5, 300, 70000])))
            if number % 3 == 0:
                stranger.shutdown(socket.SHUT_WR)
    wait_for(lambda: not listener._receiver._connections)
    wait_for(lambda: len(os.listdir(f"/proc/{running()}/fd")) <= 3)
    sender = stack.enter_context(TcpTransport(Memory(), Identity(), tls=Tls(**files)))
    assert sender.connect(listener.listen(), deadline_s=60).alive
