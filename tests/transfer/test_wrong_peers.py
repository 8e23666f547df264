"""Peers that know the secret and say something wrong lose their connection, make one line, and cost nobody else."""

from __future__ import annotations

import socket
from contextlib import suppress

import pytest
from causes import forget_causes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated.fuzz import damaged, framed
from simulated.pair import Pair
from simulated.sides import announce, close, granted, introduction, report
from simulated.strangers import dial, greet, is_closed
from simulated.waiting import wait_for

from mooncake_connector.kv.geometry import Shard
from transfer.control.directory import PURPOSE
from transfer.control.handshake import Identity
from transfer.driver import RANK_PURPOSE
from transfer.protocol.messages import MAX_MESSAGE_NBYTES, encode
from transfer.protocol.orders import Ending


@pytest.fixture(scope="module")
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def fresh_log():
    forget_causes()


@pytest.fixture(params=[PURPOSE, RANK_PURPOSE])
def purpose(request):
    return request.param


def visit(pair: Pair, *frames: bytes) -> None:
    """A consumer's rank that says this and is turned away."""
    with dial(pair.ports[RANK_PURPOSE]) as connection:
        greet(connection, RANK_PURPOSE, Identity())
        with suppress(OSError):
            for frame in frames:
                connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


INTRODUCTION = framed(encode(introduction()))
SAID = [INTRODUCTION, *(framed(encode(message)) for message in (announce(), granted(), report(), close()))]


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(first=damaged(SAID), then=st.lists(damaged(SAID) | st.binary(max_size=200), max_size=3))
def test_a_consumer_that_says_anything_loses_its_connection_and_no_more(pair, first, then):
    visit(pair, first, *then)


def test_after_all_that_requests_are_served(pair):
    pair.serves()


def test_a_malformed_message_is_logged(pair, caplog):
    rank = pair.decode.ranks[0]
    fits = introduction(
        layout=rank.layout, parts=[Shard(0, 4, 0, 4)], endpoints=rank.node._fetching._endpoints
    )
    visit(pair, framed(encode(fits)), framed(b"\xc1 nothing"))
    wait_for(lambda: "not a message" in caplog.text)
    pair.serves()


def test_whatever_strangers_say_makes_few_lines_in_the_log(pair, purpose, caplog):
    for length in range(2000, 2040):
        with dial(pair.ports[purpose]) as connection:
            connection.sendall(length.to_bytes(4, "little"))
            assert is_closed(connection)
    assert len(caplog.records) == 1 and "a frame of 2000 bytes" in caplog.text


@pytest.mark.parametrize(
    "said, line",
    [
        (framed(b"\xc1"), "not a message"),
        (framed(encode(announce())), "Announce before an introduction"),
        ((MAX_MESSAGE_NBYTES + 1).to_bytes(4, "little"), f"a frame of {MAX_MESSAGE_NBYTES + 1} bytes"),
        (framed(encode(introduction())), "model_layers, model_heads, k_dim, v_dim differ"),
    ],
    ids=["no message", "another message", "too large", "another model"],
)
def test_a_peer_that_begins_with_something_else_than_a_proper_introduction_is_logged(pair, caplog, said, line):
    visit(pair, said)
    wait_for(lambda: caplog.records)  # a connection is closed first
    assert len(caplog.records) == 1 and line in caplog.text


def test_an_order_that_fails_does_not_lose_those_after_it(monkeypatch, caplog):
    """The engine's blocks come back with the last of them."""
    forget_causes()
    pair = Pair()
    try:
        pair.begin("t")
        served = pair.prefill.ranks[0].node._serving
        wait_for(lambda: served._links)
        monkeypatch.setattr(served, "_send", lambda *_: 1 // 0)
        pair.prefill.ranks[0].node.cancel("t", "not wanted")
        (sent,) = pair.prefill.sent()
        assert sent.ending is Ending.CANCELLED
        wait_for(lambda: "an order failed: Send: ZeroDivisionError" in caplog.text)
    finally:
        pair.close()
