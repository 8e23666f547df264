"""Peers that know the secret and say something wrong lose their connection, make one line, and cost nobody else."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated.fuzz import damaged, framed
from simulated.pair import Pair
from simulated.raw_peer import dial, greet, is_closed, resident_nbytes
from simulated.sides import announce, close, granted, introduction, report
from simulated.waiting import wait_for

import transfer.control.connection
from mooncake_connector.kv.page import SegmentLayout
from transfer.control.directory import PURPOSE
from transfer.control.handshake import Identity
from transfer.driver import RANK_PURPOSE
from transfer.plan.layout import LayoutError, RankLayout
from transfer.protocol.messages import MAX_MESSAGE_NBYTES, encode
from transfer.protocol.orders import Ending
from transfer.testing.memory import MIB


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
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(first=damaged(SAID), then=st.lists(damaged(SAID) | st.binary(max_size=200), max_size=3))
def test_a_consumer_that_says_anything_loses_its_connection_and_no_more(pair, first, then):
    visit(pair, first, *then)


def test_after_all_that_requests_are_served(pair):
    pair.serves()


def test_a_malformed_message_is_logged(pair, caplog):
    visit(pair, framed(encode(introduction(pair.decode.ranks[0].layout, endpoints={}))), framed(b"\xc1 nothing"))
    wait_for(lambda: "not a message" in caplog.text)
    pair.serves()


def test_whatever_they_say_makes_few_lines_in_the_log(pair, purpose, caplog):
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


@pytest.mark.slow
def test_half_frames_of_peers_take_little_memory_and_have_a_deadline(pair, monkeypatch):
    monkeypatch.setattr(transfer.control.connection, "_FRAME_S", 5.0)
    fits = framed(encode(introduction(pair.decode.ranks[0].layout, endpoints={})))
    memory = resident_nbytes()
    with ExitStack() as stack:
        greeted = []
        for _ in range(60):
            connection = stack.enter_context(dial(pair.ports[RANK_PURPOSE]))
            greet(connection, RANK_PURPOSE, Identity())
            connection.sendall(fits)
            connection.setblocking(False)
            with suppress(OSError):
                connection.sendall(MAX_MESSAGE_NBYTES.to_bytes(4, "little"))
                for _ in range(64):
                    connection.send(bytes(MAX_MESSAGE_NBYTES // 64 - 1))
            greeted.append(connection)
        pair.serves()
        assert resident_nbytes() - memory < 160 * MIB
        greeted[0].settimeout(60)
        assert is_closed(greeted[0])


def test_an_introduction_cannot_make_this_side_work_for_long(pair, caplog):
    """A layout says of a block what it likes: this one of a quarter of a million tokens, and strides without end."""
    (layout,), tokens = pair.decode.ranks[0].layout.sections, 1 << 18
    segment = SegmentLayout(0, ((tokens, 64),), layout.blocks.k.dim)
    large = replace(layout.blocks, num_blocks=1, block_tokens=tokens, k=segment, v=replace(segment, offset=32))
    with pytest.raises(LayoutError, match="axis of 5000 strides: at most 16"):
        replace(layout, blocks=replace(large, k=replace(segment, token=((1, 0),) * 5000)))
    memory = resident_nbytes()
    said = introduction(RankLayout((replace(layout, blocks=large),)), endpoints={})
    for frame in (framed(encode(said)), (1 << 20).to_bytes(4, "little")):
        visit(pair, frame)
    for said in ("block sizes with too little in common", "at most 65536 are read"):
        wait_for(lambda: said in caplog.text)  # noqa: B023 - a connection is closed first
    assert resident_nbytes() - memory < 96 * MIB
    pair.serves()


def test_what_a_peer_says_stays_on_its_line_of_the_log(pair, caplog):
    with dial(pair.ports[PURPOSE]) as connection:
        connection.sendall(framed(msgspec.msgpack.encode({"type": "x\nERROR forged\x1b[31m"})))
        assert is_closed(connection)
    wait_for(lambda: "forged" in caplog.text)  # a connection is closed first
    shown = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(shown) == 1
    assert all(line.isprintable() for line in shown)


def test_an_order_that_fails_does_not_lose_those_after_it(make_pair, monkeypatch, caplog):
    """The engine's blocks come back with the last of them."""
    pair = make_pair()
    pair.begin("t")
    served = pair.prefill.ranks[0].node._serving
    wait_for(lambda: served._links)
    monkeypatch.setattr(served, "_send", lambda *_: 1 // 0)
    pair.prefill.ranks[0].node.cancel("t", "not wanted")
    (sent,) = pair.prefill.sent()
    assert sent.ending is Ending.CANCELLED
    wait_for(lambda: "an order failed: Send: ZeroDivisionError" in caplog.text)
