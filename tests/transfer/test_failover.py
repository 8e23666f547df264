"""Several paths between two hosts: all carry, and one that dies costs nothing but its share."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from certificates import CAN_MAKE, make_certificate
from simulated.cuda_driver import LIBRARY, SealedBuffer, StagedTcp

from transfer.testing.memory import MIB, Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports.base import Cause
from transfer.transports.memory import Memory
from transfer.transports.network import NetworkEndpoint, decode_endpoint
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

pytestmark = pytest.mark.slow
needs_certificates = pytest.mark.skipif(not CAN_MAKE, reason="NOT TESTED: certificates are made with openssl")

NBYTES = 48 * MIB
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@pytest.fixture
def pair():
    memory, there = Memory(), Memory()
    with TcpTransport(memory, hosts=HOSTS, streams=1) as sender, TcpTransport(there, hosts=HOSTS) as receiver:
        source, target = Buffer(NBYTES, seed=1), Buffer(NBYTES)
        memory.register(source.address, NBYTES)
        there.register(target.address, NBYTES)
        peer = sender.connect(receiver.listen(), deadline_s=30)
        yield peer, there.grant(int64(target.address), int64(NBYTES)), source, target


def whole(source, grant):
    return int64(source.address), grant.addresses, grant.nbytes


def test_each_pair_of_addresses_is_a_path(pair):
    assert pair[0].paths == [f"{host}->{host}#0" for host in HOSTS]


def test_every_path_carries(pair, monkeypatch):
    peer, grant, source, target = pair
    carried = dict.fromkeys(peer.paths, 0)
    for stream in peer._streams.values():
        count_sent(monkeypatch, stream, carried)
    assert outcome_of(peer.write(grant, *whole(source, grant), deadline_s=60)).ok
    assert np.array_equal(target.bytes, source.bytes)
    assert min(carried.values()) > MIB, carried


def test_a_batch_that_one_path_could_take_is_shared_as_well(pair, monkeypatch):
    """A layer of KV must not take as long as one link needs for it."""
    peer, grant, source, _ = pair
    carried = dict.fromkeys(peer.paths, 0)
    for stream in peer._streams.values():
        count_sent(monkeypatch, stream, carried)
    nbytes = int64(3 * MIB)
    assert outcome_of(peer.write(grant, int64(source.address), grant.addresses, nbytes, deadline_s=60)).ok
    assert min(carried.values()) >= MIB // 2, carried


def count_sent(monkeypatch, stream, carried):
    send = stream.channel.send_vector

    def counted(vector):
        nbytes = send(vector)
        carried[stream.label] += nbytes
        return nbytes

    monkeypatch.setattr(stream.channel, "send_vector", counted)


@pytest.mark.parametrize("dying", [1, 2])
def test_paths_that_break_in_mid_transfer_leave_it_to_the_others(pair, monkeypatch, dying, caplog):
    peer, grant, source, target = pair
    for stream in list(peer._streams.values())[:dying]:
        break_after(monkeypatch, stream, sends=2)
    assert outcome_of(peer.write(grant, *whole(source, grant), deadline_s=60)).ok
    assert np.array_equal(target.bytes, source.bytes)
    assert peer.paths == [f"{host}->{host}#0" for host in HOSTS[dying:]] and peer.alive
    assert "broke" in caplog.text


@pytest.mark.parametrize("is_secured", [False, pytest.param(True, marks=needs_certificates)])
def test_a_path_that_breaks_leaves_what_is_in_stages_to_the_others(monkeypatch, tmp_path, is_secured):
    """KV on devices, of a stand-in for the driver; with TLS and without."""
    LIBRARY.__init__()
    options = {"hosts": HOSTS, "streams": 1, "tls": Tls(**make_certificate(tmp_path)) if is_secured else None}
    memory, there = Memory(), Memory()
    source, target = SealedBuffer(NBYTES, seed=1), SealedBuffer(NBYTES)
    memory.register(source.address, NBYTES)
    there.register(target.address, NBYTES)
    with StagedTcp(memory, **options) as sender, StagedTcp(there, **options) as receiver:
        peer = sender.connect(receiver.listen(), deadline_s=30)
        sending = peer._inner
        break_after(monkeypatch, next(iter(sending._streams.values())), sends=2)
        grant = there.grant(int64(target.address), int64(NBYTES))
        assert outcome_of(peer.write(grant, *whole(source, grant), deadline_s=60)).ok
        assert np.array_equal(target.bytes, source.bytes)
        assert sending.paths == [f"{host}->{host}#0" for host in HOSTS[1:]]
        peer.close()
    assert not LIBRARY.locked


def break_after(monkeypatch, stream, sends):
    """As if the network had reset it: what was sent last may be lost."""
    send, left = stream.channel.send_vector, [None] * sends

    def breaks(vector):
        if left:
            left.pop()
            return send(vector)
        stream.channel.socket.shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError("the test broke it")

    monkeypatch.setattr(stream.channel, "send_vector", breaks)


def test_a_peer_whose_last_path_breaks_is_lost(pair, monkeypatch):
    peer, grant, source, _ = pair
    for stream in peer._streams.values():
        break_after(monkeypatch, stream, sends=0)
    outcome = outcome_of(peer.write(grant, *whole(source, grant), deadline_s=60))
    assert outcome.cause is Cause.PEER_LOST and not peer.alive


def test_a_path_that_cannot_be_connected_is_left_out():
    memory, there = Memory(), Memory()
    with TcpTransport(memory, hosts=HOSTS, streams=1) as sender, TcpTransport(there, hosts=HOSTS) as receiver:
        endpoint = receiver.listen()
        receiver._receiver._listeners[min(receiver._receiver._listeners)].shutdown(socket.SHUT_RDWR)
        assert sender.connect(endpoint, deadline_s=30).paths == [f"{host}->{host}#0" for host in HOSTS[1:]]


@pytest.fixture
def swallowed():
    """An address at which nobody answers at all, as behind a firewall: a listener whose backlog is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOSTS[1], 0))
        listener.listen(0)
        for _ in range(3):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        time.sleep(0.1)
        yield listener.getsockname()


@pytest.mark.parametrize("at", [0, 1])
def test_a_path_that_answers_nothing_leaves_time_for_the_others(swallowed, at):
    with TcpTransport(Memory(), hosts=HOSTS[:2]) as sender, TcpTransport(Memory()) as receiver:
        there = decode_endpoint(receiver.listen())
        addresses = [*there.addresses]
        addresses.insert(at, swallowed)
        endpoint = msgspec.msgpack.encode(NetworkEndpoint(addresses, there.instance))
        assert len(sender.connect(endpoint, deadline_s=16).paths) == 1


def test_what_a_breaking_path_leaves_is_taken_by_one_that_has_nothing_to_do(monkeypatch):
    """It breaks between the kernel's word that it takes bytes and the sending, when the other has had its turn."""
    memory, there = Memory(), Memory()
    source, target = Buffer(MIB, seed=1), Buffer(MIB)
    memory.register(source.address, MIB)
    there.register(target.address, MIB)
    with TcpTransport(memory, streams=2) as sender, TcpTransport(there) as receiver:
        peer = sender.connect(receiver.listen(), deadline_s=30)
        grant = there.grant(int64(target.address), int64(MIB))
        first, second = peer._streams.values()
        is_first_time = [True]

        def breaks(_):
            if is_first_time.pop() if is_first_time else first.unanswered:
                raise BlockingIOError
            raise ConnectionResetError("the test broke it")

        monkeypatch.setattr(second.channel, "send_vector", breaks)
        assert outcome_of(peer.write(grant, *whole(source, grant), deadline_s=20)).ok
    assert np.array_equal(target.bytes, source.bytes)


NETWORK = """
set -e
ip netns add {a}; ip netns add {b}
for i in 1 2; do
  ip link add {v}$i type veth peer name {w}$i
  ip link set {v}$i netns {a}; ip link set {w}$i netns {b}
  ip -n {a} addr add 10.77.$i.1/24 dev {v}$i; ip -n {b} addr add 10.77.$i.2/24 dev {w}$i
  ip -n {a} link set {v}$i up; ip -n {b} link set {w}$i up
done
"""
RECEIVING = "10.77.1.2,10.77.2.2"
SENDING = "10.77.1.1,10.77.2.1"
PROGRAM = """
import hashlib, json, sys
from transfer.transports.base import Grant
from transfer.control.handshake import Identity
from transfer.transports.memory import Memory
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of

NBYTES = 256 << 20
hosts, files = sys.argv[2].split(","), json.loads(sys.argv[3])
memory, options = Memory(), {"streams": 1, "lost_after_s": 1.0, "tls": Tls(**files) if files else None}
transport = TcpTransport(memory, Identity(b"sixteen bytes or more"), hosts=hosts, **options)
buffer = Buffer(NBYTES, seed=1 if sys.argv[1] == "send" else None)
memory.register(buffer.address, NBYTES)
if sys.argv[1] == "receive":
    grant = memory.grant(int64(buffer.address), int64(NBYTES))
    print(json.dumps([transport.listen().hex(), grant.key.hex(), buffer.address]), flush=True)
    sys.stdin.readline()
else:
    endpoint, key, address = json.loads(sys.stdin.readline())
    peer = transport.connect(bytes.fromhex(endpoint), deadline_s=30)
    grant = Grant(bytes.fromhex(key), int64(address), int64(NBYTES))
    completion = peer.write(grant, int64(buffer.address), grant.addresses, grant.nbytes, deadline_s=90)
    print(len(peer.paths), flush=True)
    print(outcome_of(completion), len(peer.paths), flush=True)
print(hashlib.sha256(buffer.bytes.data).hexdigest(), flush=True)
"""


def run(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True)


@pytest.fixture
def network():
    """Two network namespaces with two links of 1 Gbit/s between them."""
    tag = f"mct{os.getpid() % 100000}"
    names = {"a": tag + "a", "b": tag + "b", "v": tag + "v", "w": tag + "w"}
    if not shutil.which("ip") or run(NETWORK.format(**names)).returncode:
        run(f"ip netns del {names['a']}; ip netns del {names['b']}")
        pytest.skip("network namespaces cannot be made here: no `ip`, or not root")
    yield names
    run(f"ip netns del {names['a']}; ip netns del {names['b']}")


@pytest.mark.slow
@pytest.mark.parametrize("is_secured", [False, pytest.param(True, marks=needs_certificates)])
def test_a_link_cut_in_mid_transfer_loses_nothing(network, tmp_path, is_secured):
    """No reset, no error: the link takes nothing any more."""
    files = json.dumps(make_certificate(tmp_path) if is_secured else None)
    for number in (1, 2):
        limit = "tbf rate 1gbit burst 256kb latency 50ms"
        run(f"ip netns exec {network['a']} tc qdisc add dev {network['v']}{number} root {limit}")
    inside = [["ip", "netns", "exec", network[side], sys.executable, "-c", PROGRAM] for side in "ba"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/"}
    with subprocess.Popen([*inside[0], "receive", RECEIVING, files], **pipes) as receiver:
        with subprocess.Popen([*inside[1], "send", SENDING, files], **pipes) as sender:
            sender.stdin.write(receiver.stdout.readline())
            sender.stdin.flush()
            assert sender.stdout.readline() == "2\n"
            time.sleep(0.4)
            assert run(f"ip -n {network['b']} link set {network['w']}2 down").returncode == 0
            assert sender.stdout.readline() == "ok 1\n"
            sent = sender.stdout.readline()
        receiver.stdin.write("\n")
        receiver.stdin.flush()
        assert receiver.stdout.readline() == sent != ""
