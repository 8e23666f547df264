"""Which transport is taken, and what is said about those that are not."""

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
from simulated.cuda_driver import LIBRARY

from mooncake_connector.config.schema import Config
from mooncake_connector.config.values import TRANSPORTS
from mooncake_connector.errors import ConfigError
from transfer.control.handshake import Identity
from transfer.transports import registry
from transfer.transports.base import TransferError, TransportOptions, Unavailable
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.stage import OnDevice
from transfer.transports.memory import Memory
from transfer.transports.registry import check_configured, make_transports, names, transport_class


@pytest.fixture
def opened():
    made = []

    def make(*names):
        made.append(make_transports(names, Memory(), TransportOptions(Identity())))
        return made[-1]

    yield make
    for transports in made:
        transports.close()


def fallbacks(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_first_that_both_sides_have_is_taken(opened, caplog):
    endpoints = opened(*TRANSPORTS).listen()
    assert opened("cma", "shm", "tcp").connect(endpoints, deadline_s=30).transport == "cma"
    assert opened("tcp", "shm", "cma").connect(endpoints, deadline_s=30).transport == "tcp"
    assert fallbacks(caplog) == []


def test_a_transport_that_the_peer_lacks_is_passed_over_with_one_line(opened, caplog):
    here, endpoints = opened("cma", "shm", "tcp"), opened("tcp").listen()
    for _ in range(3):
        assert here.connect(endpoints, deadline_s=30).transport == "tcp"
    assert fallbacks(caplog) == [
        "cma: the peer does not offer it; using tcp",
        "shm: the peer does not offer it; using tcp",
    ]


def test_a_peer_of_another_host_is_reached_over_tcp(opened, caplog, monkeypatch):
    endpoints = opened(*TRANSPORTS).listen()
    monkeypatch.setattr("transfer.transports.local.boot_id", lambda: "another boot")
    assert opened(*TRANSPORTS).connect(endpoints, deadline_s=30).transport == "tcp"
    assert "cma: the peer is on another host; using tcp" in fallbacks(caplog)


def test_a_peer_that_nothing_reaches_is_an_error_with_every_reason(opened):
    there = opened(*TRANSPORTS)
    endpoints = there.listen()
    there.close()
    with pytest.raises(Unavailable, match=r"cma: nobody listens there.*shm: nobody.*tcp: 127\.0\.0\.1:\d+: .*refused"):
        opened(*TRANSPORTS).connect(endpoints, deadline_s=30)


@pytest.mark.parametrize(("asked", "cards", "encrypted", "tried"), [
    (["auto"], [], False, ["cma", "shm", "tcp"]),
    (["auto"], [False], False, ["cma", "shm", "tcp"]),
    (["auto"], [False, True], False, ["cma", "shm", "rdma", "tcp"]),
    (["auto"], [True], True, ["cma", "shm", "tcp"]),
    (["rdma", "auto"], [True], True, ["rdma", "cma", "shm", "tcp"]),
    (["nixl", "auto"], [True], False, ["nixl", "cma", "shm", "rdma", "tcp"]),
    (["shm", "tcp"], [True], False, ["shm", "tcp"]),
])  # fmt: skip
def test_auto_takes_what_needs_a_card_only_where_one_is_up_and_nothing_is_to_be_encrypted(
    asked, cards, encrypted, tried, monkeypatch, caplog
):
    monkeypatch.setattr(registry, "rails", lambda: [SimpleNamespace(is_up=is_up) for is_up in cards])
    check_configured(asked, ["127.0.0.1"])
    with caplog.at_level(logging.INFO):
        assert registry.serving(asked, hosts=["127.0.0.1"], encrypted=encrypted) == tried
    is_left_out = encrypted and cards == [True] and "rdma" not in asked
    assert ("rdma is left out: it does not encrypt" in caplog.text) == is_left_out
    assert registry.serving(asked, encrypted=encrypted) == [name for name in tried if name in ("cma", "shm")]
    device = registry.serving(asked, device=True, hosts=["127.0.0.1"], encrypted=encrypted)
    assert [name for name in device if name != "cuda_ipc"] == [name for name in tried if name != "cma"]


def test_auto_is_tried_as_what_it_stands_for(opened):
    endpoints = opened("auto").listen()
    assert opened("auto").connect(endpoints, deadline_s=30).transport == "cma"


def test_an_unknown_name_is_refused():
    with pytest.raises(TransferError, match="'dove' is unknown: there are cuda_ipc, cma, shm, tcp"):
        make_transports(["dove"], Memory(), TransportOptions(Identity()))


def test_memory_of_a_device_has_the_transports_that_serve_it():
    options = TransportOptions(Identity(), place=OnDevice(Driver(LIBRARY), 0))
    with make_transports(TRANSPORTS, Memory(), options) as transports:
        assert list(transports.listen()) == ["cuda_ipc", "shm", "tcp"]
    with make_transports(TRANSPORTS, Memory(), TransportOptions(Identity())) as transports:
        assert "cuda_ipc" not in transports.listen()


def test_a_transport_that_cannot_listen_is_left_out(opened, caplog, monkeypatch):
    transports = opened("cma", "tcp")

    def fail(self):
        raise OSError("no sockets today")

    monkeypatch.setattr("transfer.transports.cma.CmaTransport.listen", fail)
    assert list(transports.listen()) == ["tcp"]
    assert fallbacks(caplog) == ["transport cma cannot listen: no sockets today"]
    counted, again = transports.take_counts(), transports.take_counts()
    assert counted["transports_left_out"] == {"cma: cannot listen: no sockets today": 1}
    assert "transports_left_out" not in again


WITHOUT_PERMISSION = """
import ctypes, logging, os, sys
import numpy as np
from transfer.transports.base import Grant, TransportOptions
from transfer.transports.registry import make_transports
from transfer.control.handshake import Identity
from transfer.transports.memory import Memory
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of

logging.basicConfig(format="%(message)s", stream=sys.stdout)
memory, buffer = Memory(), Buffer(1 << 20, seed=1)
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)  # gives up CAP_SYS_PTRACE
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody without that capability may read our memory
memory.register(buffer.address, buffer.nbytes)
to_parent, to_child = os.pipe(), os.pipe()
if os.fork() == 0:
    target = Buffer(1 << 20)
    memory = Memory()
    memory.register(target.address, target.nbytes)
    grant = memory.grant(int64(target.address), int64(target.nbytes))
    endpoints = make_transports(["cma", "shm", "tcp"], memory, TransportOptions(Identity())).listen()
    os.write(to_parent[1], repr((endpoints, grant.key, target.address)).encode())
    os.read(to_child[0], 1)
    os._exit(0 if np.array_equal(target.bytes, buffer.bytes) else 3)
import ast
endpoints, key, address = ast.literal_eval(os.read(to_parent[0], 4096).decode())
with make_transports(["cma", "shm", "tcp"], memory, TransportOptions(Identity())) as transports:
    peer = transports.connect(endpoints, deadline_s=30)
    grant = Grant(key, int64(address), int64(buffer.nbytes))
    outcome = outcome_of(peer.write(grant, int64(buffer.address), int64(address), int64(buffer.nbytes), deadline_s=30))
    os.write(to_child[1], b"x")
    _, status = os.wait()
    print(peer.transport, outcome, status)
"""


def test_without_permission_to_read_memory_shm_is_taken():
    """The real thing: a process that gave up the right, and whose memory may not be read."""
    command = [sys.executable, "-c", WITHOUT_PERMISSION]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["shm ok 0"], done.stdout + done.stderr
    assert lines[0].startswith("cma: the peer may not read this process's memory (process_vm_readv)")
    assert lines[0].endswith("; using shm")


def test_closing_twice_is_fine(opened):
    transports = opened(*TRANSPORTS)
    transports.listen()
    transports.close()
    transports.close()


@pytest.mark.parametrize("name", ["cma", "shm", "tcp"])
def test_a_transport_that_is_closed_connects_no_more(name):
    """Nobody would close the connection: one may be made by another thread while the transport is closed."""
    here, there = (make_transports([name], Memory(), TransportOptions(Identity())) for _ in range(2))
    with here, there:
        endpoints = there.listen()
        here.close()
        with pytest.raises(Unavailable, match="closed meanwhile"):
            here.connect(endpoints, deadline_s=10)


def test_the_configured_names_are_checked_before_anything_is_made():
    check_configured(Config().transports, ())
    check_configured(["tcp"], ["10.0.0.1"])
    with pytest.raises(ConfigError, match="transports has 'dove', which is unknown: expected some of cuda_ipc, cma, "):
        check_configured(["cma", "dove"], ())
    with pytest.raises(ConfigError, match=r"transports is tcp and transfer_hosts is empty: .*or add one .*cma, shm$"):
        check_configured(["tcp"], ())


def test_the_default_is_all_that_need_no_other_library():
    assert [name for name in names() if not transport_class(name).capabilities.needs_library] == list(TRANSPORTS)
    assert names()[len(TRANSPORTS) :] == ("rdma", "nixl", "mooncake")
