"""A transport that fetches registered memory in any order: the conformance class, and nodes that use it."""

import os
from pathlib import Path

import pytest
from simulated.completion_queue import FarQueueTransport, QueueTransport
from simulated.nodes import Instances, endings

from transfer.control.handshake import Identity
from transfer.protocol.orders import Ending
from transfer.session import NodeOptions
from transfer.testing.conformance import TransportConformance
from transfer.testing.memory import Buffer, int64
from transfer.testing.waiting import outcome_of
from transfer.transports import registry
from transfer.transports.base import Cause, TransferError, TransportOptions
from transfer.transports.memory import Memory

TESTS = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Other processes find the module as well."""
    monkeypatch.setenv("PYTHONPATH", TESTS, prepend=os.pathsep)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(QueueTransport, "refused", set())
    registry.register(QueueTransport)
    registry.register(FarQueueTransport)


class TestCompletionQueue(TransportConformance):
    transport = QueueTransport


@pytest.mark.parametrize("name, hosts", [("queue", ()), ("far_queue", ("127.0.0.1",))])
def test_nodes_that_are_configured_with_it_hand_over_with_it(make, name, hosts):
    options = NodeOptions(transports=[name], hosts=hosts, page_tokens=16)
    p, d = (start(tp, options=options) for start, tp in zip(make, (2, 1), strict=True))
    d.fetch("t", p.where, computed=False)
    p.prefill("t")
    assert endings(d.fetched()) == {Ending.DONE}
    d.check()
    assert {ended.transport for ended in p.sent()} == {name}


def test_it_serves_where_its_capabilities_say():
    assert registry.serving() == ["cma", "shm", "queue"]
    far = ["tcp", "rdma", "nixl", "mooncake"]
    assert registry.serving(hosts=["10.0.0.1"]) == ["cma", "shm", *far, "queue", "far_queue"]
    assert registry.serving(["queue", "cuda_ipc"], device=True) == ["cuda_ipc"]
    fitting = r"none of them serves memory of a device; add cuda_ipc or shm, or set transfer_hosts for tcp or rdma"
    with pytest.raises(TransferError, match=fitting):
        Instances(1, [0], options=NodeOptions(transports=["queue"]), device=0)


def test_two_transports_cannot_have_one_name():
    registry.register(QueueTransport)
    with pytest.raises(ValueError, match="transport queue is QueueTransport already"):
        registry.register(type("Another", (QueueTransport,), {}))


@pytest.fixture
def region():
    """Registered memory."""
    buffer, memory = Buffer(4096), Memory()
    memory.register(buffer.address, buffer.nbytes)
    return buffer, memory


def test_one_that_cannot_register_the_memory_is_left_out_with_one_line(region, caplog):
    buffer, memory = region
    QueueTransport.refused.add(buffer.address)
    for _ in range(2):
        with registry.make_transports(["queue", "shm"], memory, TransportOptions(Identity())) as made:
            assert list(made.listen()) == ["shm"]
    assert [record.getMessage() for record in caplog.records] == [
        f"transport queue is left out: it cannot use the 4096 bytes at {buffer.address:#x}: the card has no room for it"
    ]


def test_one_that_cannot_register_further_memory_is_closed_with_one_line(region, caplog):
    _, memory = region
    second = Buffer(4096)
    QueueTransport.refused.add(second.address)
    options = TransportOptions(Identity())
    with (
        registry.make_transports(["queue", "shm"], memory, options) as made,
        registry.make_transports(["queue", "shm"], Memory(), options) as far,
    ):
        endpoints = made.listen()
        peer = far.connect(endpoints, deadline_s=30)
        assert peer.transport == "queue"
        memory.register(second.address, second.nbytes)
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["transport queue is closed"]
        assert far.connect(endpoints, deadline_s=30).transport == "shm"
        assert far.connect(made.listen(), deadline_s=30).transport == "shm"


@pytest.mark.parametrize("told", ["sender", "receiver"])
def test_memory_that_one_side_was_not_told_of_is_not_touched(told):
    source, target, here, there = Buffer(4096, seed=1), Buffer(4096), Memory(), Memory()
    here.register(source.address, 4096)
    there.register(target.address, 4096)
    grant = there.grant(int64(target.address), int64(4096))
    with QueueTransport(here) as sender, QueueTransport(there) as receiver:
        if told == "sender":
            here.follow(sender)
        else:
            there.follow(receiver)
        peer = sender.connect(receiver.listen(), deadline_s=30)
        write = peer.write(grant, int64(source.address), grant.addresses, grant.nbytes, deadline_s=30)
        assert outcome_of(write).cause is Cause.SOURCE and not target.bytes.any()
