"""Closed by default: who does not know the secret gets nowhere at any listener, and who does not beyond its grant.

The listeners of an instance are its directory, the control port of each rank, and the data port of each rank.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated.fuzz import damaged
from simulated.nodes import SECRET
from simulated.pair import Pair
from simulated.ranks import SMALL
from simulated.raw_peer import dial, greet, is_closed, tcp_port
from simulated.waiting import wait_for

from transfer.control.connection import Access
from transfer.control.directory import PURPOSE, Directory, RankCard
from transfer.control.handshake import MAX_FRAME_NBYTES, Client, Identity
from transfer.driver import RANK_PURPOSE
from transfer.plan.layout import RankLayout
from transfer.session import Node, NodeOptions
from transfer.testing.memory import int64
from transfer.transports.base import TransferError
from transfer.transports.wire import ANSWER_NBYTES, CopyOrder, CopyStatus, decode_answer

PURPOSES = (PURPOSE, RANK_PURPOSE, "tcp")


class Deployment(Pair):
    """A prefill instance whose listeners are attacked, and a decode instance that is served all the same."""

    def __init__(self) -> None:
        options = NodeOptions(transports=["tcp"], hosts=["127.0.0.1"], page_tokens=16)
        super().__init__(options)
        self.ports["tcp"] = tcp_port(self.prefill.ranks[0].node._transports.listen()["tcp"])
        self.memory = self.decode.ranks[0].node._fetching._memory
        self.data_port = tcp_port(self.decode.ranks[0].node._transports.listen()["tcp"])


@pytest.fixture(scope="module")
def deployment():
    deployment = Deployment()
    yield deployment
    deployment.close()


@pytest.fixture(params=PURPOSES)
def purpose(request):
    return request.param


def one_line(caplog, text: str) -> None:
    wait_for(lambda: text in caplog.text)  # a connection is closed first
    assert len([record for record in caplog.records if text in record.getMessage()]) == 1, caplog.text


@pytest.mark.parametrize("host", ["10.255.255.1", "0.0.0.0", "::"])
def test_nothing_listens_beyond_loopback_without_a_secret(host):
    layout = RankLayout((SMALL,))
    refusal = f"address {host!r} is not loopback and no shared secret is set: set the same secret"
    for transport in ("cma", "tcp"):
        options = NodeOptions(transports=[transport], hosts=[host])
        with pytest.raises(TransferError, match=refusal):
            Node(layout, [(1 << 20, 1 << 16)], Access(Identity()), options)
    with pytest.raises(TransferError, match=refusal):
        Directory("engine", [RankCard(host, 1, bytes(16), layout)], 1, (host, 0), Access(Identity()))


def test_no_port_is_opened_without_hosts(make_pair):
    def listening() -> set[str]:
        with open("/proc/net/tcp") as file:
            rows = [line.split() for line in file.readlines()[1:]]
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        mine = {os.readlink(link) for link in links if os.path.islink(link)}
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}

    before = listening()
    pair = make_pair()
    assert listening() == before
    assert pair.prefill.ranks[0].node.card.host == "" and pair.prefill.where.host == "127.0.0.1"
    make_pair(NodeOptions(transports=["tcp"], hosts=["127.0.0.1"]))
    assert len(listening() - before) >= 6


def test_a_wrong_secret_is_refused_and_logged(deployment, purpose, caplog):
    with dial(deployment.ports[purpose], tcp=True) as connection:
        with pytest.raises(TransferError, match="wrong secret"):
            greet(connection, purpose, Identity(b"another sixteen bytes"))
        assert is_closed(connection)
    one_line(caplog, "wrong secret")
    deployment.serves()


def test_a_handshake_that_was_recorded_opens_nothing_and_is_logged(deployment, purpose, caplog):
    client = Client(Identity(SECRET), purpose)
    recorded = []
    with dial(deployment.ports[purpose], tcp=True) as connection:
        said = client.start()
        while client.peer is None:
            recorded.append(said)
            connection.sendall(said)
            said = client.receive(connection.recv(MAX_FRAME_NBYTES))
    assert len(recorded) == 2
    with dial(deployment.ports[purpose], tcp=True) as connection:
        for said in recorded:
            connection.sendall(said)
            answer = connection.recv(MAX_FRAME_NBYTES)
        assert b"wrong secret" in answer
        assert is_closed(connection)
    one_line(caplog, "wrong secret")
    deployment.serves()


def test_a_handshake_for_another_listener_opens_nothing(deployment, purpose):
    for other in PURPOSES:
        if other != purpose:
            with dial(deployment.ports[purpose], tcp=True) as connection:
                with pytest.raises(TransferError, match=f"'{other}': '{purpose}' is served here"):
                    greet(connection, other, Identity(SECRET))
                assert is_closed(connection)


@pytest.mark.parametrize("length", [MAX_FRAME_NBYTES + 1, (1 << 32) - 1])
def test_a_frame_too_large_is_refused_before_the_secret_is_asked_for_and_logged(deployment, purpose, length, caplog):
    with dial(deployment.ports[purpose], tcp=True) as connection:
        connection.sendall(length.to_bytes(4, "little"))
        assert is_closed(connection)
    one_line(caplog, f"malformed handshake: a frame of {length} bytes")
    deployment.serves()


def test_a_handshake_that_is_cut_off_costs_nothing(deployment, purpose):
    hello = Client(Identity(SECRET), purpose).start()
    for length in (0, 1, 4, 5, len(hello) - 1, len(hello)):
        with dial(deployment.ports[purpose], tcp=True) as connection:
            connection.sendall(hello[:length])
    deployment.serves()


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300) | damaged([Client(Identity(SECRET), "rank").start()]))
def test_one_that_says_anything_gets_nowhere(deployment, purpose, data):
    with dial(deployment.ports[purpose], tcp=True) as connection:
        connection.sendall(data)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


def test_after_all_that_the_listeners_serve_on(deployment):
    deployment.serves()


# Who knows the secret


def writes(connection, key: bytes, address: int) -> CopyStatus:
    """The answer to an order for 100 bytes."""
    order = CopyOrder(1, key, 1, 100).encode(int64(address), int64(100))
    connection.sendall(order.tobytes() + b"x" * 100)
    return decode_answer(connection.recv(ANSWER_NBYTES))[1]


def test_a_peer_writes_where_it_was_granted_and_nowhere_else(deployment, caplog):
    there = deployment.decode.ranks[0].bytes
    there[:] = 0
    granted = deployment.memory.grant(int64(there.ctypes.data + 1000), int64(200))
    with dial(deployment.data_port, tcp=True) as connection:
        greet(connection, "tcp", Identity(SECRET))
        for offset in (0, 950, 1101, 1200):
            assert writes(connection, granted.key, there.ctypes.data + offset) is CopyStatus.OUTSIDE
        assert writes(connection, b"k" * 16, there.ctypes.data + 1000) is CopyStatus.NO_GRANT
        assert not there.any()
        assert writes(connection, granted.key, there.ctypes.data + 1100) is CopyStatus.OK
        assert there.sum() == 100 * ord("x")
        deployment.memory.revoke(granted)
        assert writes(connection, granted.key, there.ctypes.data + 1000) is CopyStatus.NO_GRANT
    assert not there[:1100].any()
    one_line(caplog, "outside of the memory granted to it: refused")
    deployment.serves()


def test_an_order_that_ends_in_its_middle_writes_no_more_than_came(deployment):
    there = deployment.decode.ranks[0].bytes
    there[:] = 0
    granted = deployment.memory.grant(int64(there.ctypes.data), int64(200))
    order = CopyOrder(1, granted.key, 1, 200).encode(int64(there.ctypes.data), int64(200)).tobytes()
    for length in (1, len(order) - 1, len(order), len(order) + 100):
        with dial(deployment.data_port, tcp=True) as connection:
            greet(connection, "tcp", Identity(SECRET))
            connection.sendall((order + b"x" * 200)[:length])
            connection.shutdown(socket.SHUT_WR)
            assert is_closed(connection)
        assert there.sum() == max(0, length - len(order)) * ord("x")
    deployment.memory.revoke(granted)
    deployment.serves()
