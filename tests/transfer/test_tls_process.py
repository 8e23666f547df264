"""The process that does TLS may be killed, stopped or never start, and goes with the process that it serves."""

import itertools
import json
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from certificates import CAN_MAKE, make_certificate
from simulated.waiting import wait_for

from mooncake_connector import log
from transfer.control.handshake import Identity
from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.process import Process
from transfer.testing.waiting import outcome_of
from transfer.transports import tls as tls_
from transfer.transports import tls_relay
from transfer.transports.base import Cause, TransferError, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.network import decode_endpoint
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

pytestmark = pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("ours"))


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """A test begins without a process, and with nothing logged or counted."""
    own = tls_.TlsProcess()
    monkeypatch.setattr(tls_, "_process", own)
    monkeypatch.setattr(log, "_seen", set())
    yield own
    wait_for(lambda: not helpers())
    wait_for(lambda: "mooncake-tls-process" not in [thread.name for thread in threading.enumerate()])  # it has logged


def helpers(pid=None):
    """Processes that do TLS and are children of `pid`, those that nobody has waited for included."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, _, rest = status.read_text().rpartition(")")
            is_ours = "tls_relay.py" in (status.parent / "cmdline").read_text() or rest.split()[0] == "Z"
            if is_ours and int(rest.split()[1]) == (pid or os.getpid()):
                found.append(int(status.parent.name))
    return found


def running():
    (pid,) = [pid for pid in helpers() if Path(f"/proc/{pid}/cmdline").read_text()]
    return pid


class Pair:
    """A sender here, and a receiver in another process, which has a process for its TLS as well."""

    def __init__(self, stack, files, nbytes=64 * MIB, **options):
        self.other = Process(TcpTransport, {"tls": files, "lost_after_s": 60.0})
        stack.callback(self.other.kill)
        self.endpoint, self.grant = self.other.offer(nbytes)
        self.memory = Memory()
        self.source = Buffer(nbytes, seed=1)
        self.memory.register(self.source.address, nbytes)
        self.sender = stack.enter_context(TcpTransport(self.memory, tls=Tls(**files), **options))
        self.peer = None

    def connect(self):
        """Also where the process that did TLS has just ended, some times in a row."""
        for attempt in range(100):
            try:
                self.peer = self.sender.connect(self.endpoint, deadline_s=60)
                return self.peer
            except Unavailable:
                assert attempt < 99
                time.sleep(0.1)

    def write(self, deadline_s=60):
        return self.peer.write(
            self.grant, int64(self.source.address), self.grant.addresses, self.grant.nbytes, deadline_s=deadline_s
        )

    @property
    def helper_there(self):
        (pid,) = helpers(self.other.process.pid)
        return pid


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


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


def test_files_that_have_gone_meanwhile_are_named(stack, files, tmp_path):
    """They are read when the process is started, or first used there."""
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    os.unlink(copies["key"])
    with pytest.raises(Unavailable, match=f"TLS files .*{copies['key']}.* cannot be used"):
        sender.connect(pair.endpoint, deadline_s=60)


def test_a_key_that_is_locked_meanwhile_is_refused_and_others_go_on(stack, files, tmp_path):
    """Asked for its passphrase on its standard input, the process took what the engine hands over for the answer."""
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    lock = ["openssl", "ec", "-in", files["key"], "-aes256", "-passout", "pass:unknown", "-out", copies["key"]]
    subprocess.run(lock, check=True, capture_output=True)
    with pytest.raises(Unavailable, match=r"TLS files .* cannot be used"):
        sender.connect(pair.endpoint, deadline_s=10)
    assert pair.connect().alive


@pytest.mark.parametrize("role", ["certificate", "key", "authority"])
def test_a_pipe_is_no_file_also_where_it_took_the_place_of_one(stack, files, tmp_path, role):
    """Who opens one waits until somebody writes to it."""
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    os.unlink(copies[role])
    os.mkfifo(copies[role])
    with pytest.raises(TransferError, match=f"{copies[role]} is no regular file"):
        TcpTransport(Memory(), tls=Tls(**copies))
    with pytest.raises(Unavailable, match=f"{copies[role]} is no regular file"):
        sender.connect(pair.endpoint, deadline_s=60)
    assert pair.connect().alive


def copied(files, folder):
    copies = {}
    for role, path in files.items():
        copies[role] = str(folder / role)
        Path(copies[role]).write_bytes(Path(path).read_bytes())
    return copies


def test_a_reason_that_names_the_longest_paths_is_told_whole(stack, files, tmp_path):
    """Each letter of these takes 6 bytes on the way; a reason that was cut off there ended the sender's thread."""
    folder = tmp_path.joinpath(*["\u00e4" * 120] * 3)
    folder.mkdir(parents=True)
    copies = copied(files, folder)
    pair = Pair(stack, files)
    sender = stack.enter_context(TcpTransport(Memory(), tls=Tls(**copies)))
    os.unlink(copies["key"])
    with pytest.raises(Unavailable, match="TLS files"):
        sender.connect(pair.endpoint, deadline_s=60)
    assert pair.connect().alive


def test_relative_paths_count_from_where_the_transport_was_made(stack, files, tmp_path, monkeypatch):
    copies = copied(files, tmp_path)
    pair = Pair(stack, files)
    monkeypatch.chdir(tmp_path)
    relative = Tls(**{role: os.path.basename(path) for role, path in copies.items()})
    sender = stack.enter_context(TcpTransport(Memory(), tls=relative))
    monkeypatch.chdir("/")
    assert sender.connect(pair.endpoint, deadline_s=60).alive


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
