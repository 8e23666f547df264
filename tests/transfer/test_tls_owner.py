"""The process that does TLS comes and goes with the process that it serves, and takes nothing of it along."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from certificates import CAN_MAKE
from simulated.tls_process import Pair, helpers, running
from simulated.waiting import wait_for

from transfer.testing.memory import MIB
from transfer.testing.waiting import outcome_of
from transfer.transports import tls as tls_
from transfer.transports import tls_relay
from transfer.transports.memory import Memory
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

pytestmark = [
    pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`"),
    pytest.mark.usefixtures("anew"),
]


def test_it_ends_with_the_last_transport_and_that_is_no_fault(files, caplog):
    for _ in range(2):  # the next one starts it again at once
        with TcpTransport(Memory(), tls=Tls(**files)) as sender:
            with TcpTransport(Memory(), tls=Tls(**files)) as there:
                assert sender.connect(there.listen(), deadline_s=60).alive
                helper = running()
            assert running() == helper
        wait_for(lambda: not helpers())
    wait_for(lambda: "mooncake-tls-process" not in [thread.name for thread in threading.enumerate()])
    assert sender.take_counts() == {} and not [record for record in caplog.records if "ended" in record.getMessage()]


def test_a_connection_keeps_it_as_a_transport_does(files):
    near, far = socket.socketpair()
    with far, TcpTransport(Memory(), tls=Tls(**files)):
        channel = Tls(**files).secure(near, server=True)
    assert running()
    channel.close()
    wait_for(lambda: not helpers())


PROGRAM = """
import json, os, sys, threading, time
from transfer.control.handshake import Identity
from transfer.testing.memory import Buffer, int64
from transfer.transports.base import Grant
from transfer.transports.memory import Memory
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

files, endpoint, key, address, how = json.loads(sys.argv[1])
memory, nbytes = Memory(), 64 << 20
source = Buffer(nbytes, seed=1)
memory.register(source.address, nbytes)
sender = TcpTransport(memory, tls=Tls(**files))
peer = sender.connect(bytes.fromhex(endpoint), deadline_s=60)
grant = Grant(bytes.fromhex(key), int64(address), int64(nbytes))
writes = [peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=60) for _ in range(50)]
child = os.fork() if how == "fork" else -1
if not child:
    time.sleep(600)
print("begun", child, flush=True)
time.sleep(0.05)
if how != "exit":
    time.sleep(600)
"""


@contextmanager
def engine(pair, files, how):
    said = json.dumps([files, pair.endpoint.hex(), pair.grant.key.hex(), pair.grant.addresses.item(), how])
    command = [sys.executable, "-c", PROGRAM, said]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/") as process:
        try:
            yield process
        finally:
            process.kill()


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_when_the_engine_ends_in_mid_transfer_so_does_it_and_nothing_crashes(stack, files):
    pair = Pair(stack, files)
    for _ in range(5):
        with engine(pair, files, "exit") as process:
            assert process.stdout.readline() == "begun -1\n"
            (helper,) = helpers(process.pid)
            assert process.wait(60) == 0 and process.stderr.read() == ""
            wait_for(lambda helper=helper: not is_there(helper))


LAST_WORDS = """
import json, os, socket, sys
from transfer.transports.tls import Tls

files, port, nbytes = json.loads(sys.argv[1])
connection = socket.create_connection(("127.0.0.1", port))
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
Tls(**files).secure(connection, server=False).sendall(bytes(nbytes))
os._exit(0)
"""


@pytest.mark.slow
def test_what_the_engine_said_before_it_ended_still_arrives(files):
    """What the kernel has not taken yet is with the process that does TLS, or on the way to it."""
    context = tls_relay.make_context(**files, server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        said = json.dumps([files, listener.getsockname()[1], MIB])
        with subprocess.Popen([sys.executable, "-c", LAST_WORDS, said], cwd="/") as process:
            accepted, _ = listener.accept()
            accepted.settimeout(60)
            peer = context.wrap_socket(accepted, server_side=True, suppress_ragged_eofs=False)
            left = MIB
            while left > 100_000:
                left -= len(peer.recv(min(16384, left - 100_000)))
            assert process.wait(60) == 0
            while more := peer.recv(16384):  # raises where it is no end
                left -= len(more)
            assert not left
            peer.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "fork"])
def test_when_the_engine_is_killed_it_goes_also_where_a_forked_child_lives_on(stack, files, how):
    pair = Pair(stack, files)
    with engine(pair, files, how) as process:
        child = int(process.stdout.readline().split()[1])
        (helper,) = helpers(process.pid)
        process.kill()
        try:
            wait_for(lambda: not is_there(helper))
            assert child < 0 or is_there(child)
        finally:
            if child > 0:
                os.kill(child, signal.SIGKILL)


def test_a_forked_child_has_one_of_its_own_and_the_parents_goes_on(stack, files):
    pair = Pair(stack, files)
    pair.connect()
    child = os.fork()
    if not child:
        status = 1
        with suppress(BaseException):
            sender = TcpTransport(Memory(), tls=Tls(**files))
            assert sender.connect(pair.endpoint, deadline_s=60).alive and len(helpers()) == 1
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert outcome_of(pair.write()).ok


def test_a_forked_child_that_closes_a_connection_of_its_parents_keeps_its_own(files):
    (near, far), (near_there, far_there) = socket.socketpair(), socket.socketpair()
    with far, far_there:
        inherited = Tls(**files).secure(near, server=True)
        child = os.fork()
        if not child:
            status = 1
            with suppress(BaseException):
                own = Tls(**files).secure(near_there, server=True)
                inherited.close()
                status = 0 if tls_._process._control is not None else 2
                own.close()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        near_there.close()
        inherited.close()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_stream_that_is_closed_ends_though_a_forked_child_has_a_copy(stack, files):
    there = Memory()
    listener = stack.enter_context(TcpTransport(there, tls=Tls(**files)))
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**files)))
    peer = sender.connect(listener.listen(), deadline_s=60)
    wait_for(lambda: [one for one in listener._receiver._connections.values() if not one.is_pending])
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    try:
        peer.close()
        wait_for(lambda: not listener._receiver._connections)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def open_files(pid):
    found = []
    for one in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{one}").split(":")[0])
    return sorted(found)


def test_it_inherits_nothing_but_its_control_socket(stack, files, tmp_path):
    secret = stack.enter_context((tmp_path / "secret").open("w"))
    os.set_inheritable(secret.fileno(), True)
    stack.enter_context(TcpTransport(Memory(), tls=Tls(**files))).listen()
    helper = running()
    wait_for(lambda: "_ssl" in Path(f"/proc/{helper}/maps").read_text())  # it runs
    wait_for(lambda: open_files(helper) == ["/memfd", "/memfd", "socket"])  # and has opened what it imports
    environment = Path(f"/proc/{helper}/environ").read_bytes()
    assert {line.split(b"=")[0].decode() for line in environment.split(b"\0") if line} <= set(tls_._VARIABLES)
    assert os.getsid(helper) == helper
