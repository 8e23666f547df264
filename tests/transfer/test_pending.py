"""Connections that have not finished their handshake: how long each may take, and how many there may be."""

from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack

import pytest
from causes import forget_causes
from certificates import CAN_MAKE, make_certificate
from simulated.pair import Pair
from simulated.strangers import dial, is_closed
from simulated.waiting import wait_for

import transfer.control.listener
from transfer.control import pending
from transfer.control.directory import PURPOSE
from transfer.driver import RANK_PURPOSE
from transfer.session import NodeOptions
from transfer.transports.tls import Tls


@pytest.fixture(autouse=True)
def fresh_log():
    forget_causes()


@pytest.fixture(params=[PURPOSE, RANK_PURPOSE])
def purpose(request):
    return request.param


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.slow
def test_a_request_under_way_is_not_disturbed_by_a_thousand_strangers(pair, purpose):
    pair.begin(f"disturbed at its {purpose}")
    wait_for(lambda: pair.prefill.ranks[0].node._serving._visitors)
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(dial(pair.ports[purpose]))
        pair.end(f"disturbed at its {purpose}")
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before + 5)
    pair.serves()


def test_slow_strangers_are_turned_away_after_a_time_and_others_served_then(monkeypatch, purpose, caplog):
    monkeypatch.setattr(transfer.control.listener, "_STRANGER_S", 0.3)
    pair = Pair()
    try:
        with ExitStack() as stack:
            slow = [stack.enter_context(dial(pair.ports[purpose])) for _ in range(pending.MAX_FROM_ONE)]
            assert all(is_closed(connection) for connection in slow)
            wait_for(lambda: caplog.records)  # a connection is closed first
            monkeypatch.undo()  # what serves may be slow as well
            pair.serves()
    finally:
        pair.close()
    assert "no handshake within 0.3 s" in caplog.text


def test_a_stranger_that_says_one_byte_at_a_time_has_no_more_time(monkeypatch, purpose):
    monkeypatch.setattr(transfer.control.listener, "_STRANGER_S", 0.3)
    pair = Pair()
    try:
        with dial(pair.ports[purpose]) as connection, pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(b"\x00")
                time.sleep(0.02)
    finally:
        pair.close()


def test_beyond_a_number_of_strangers_the_oldest_goes_and_is_logged_once(monkeypatch, purpose, caplog):
    monkeypatch.setattr(pending, "MAX_FROM_ONE", 4)
    monkeypatch.setattr(transfer.control.listener, "_STRANGER_S", 600.0)
    pair = Pair()
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(dial(pair.ports[purpose])) for _ in range(8)]
            assert all(is_closed(connection) for connection in connections[:4])
            assert not select.select(connections[4:], [], [], 0)[0]
            wait_for(lambda: caplog.records)
            assert len(caplog.records) == 1
            assert "too many connections have not finished their handshake; the oldest is closed" in caplog.text
    finally:
        pair.close()


@pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")
def test_strangers_that_have_not_even_begun_with_tls_count(monkeypatch, tmp_path):
    monkeypatch.setattr(pending, "MAX_FROM_ONE", 4)
    monkeypatch.setattr(transfer.control.listener, "_STRANGER_S", 600.0)
    tls, identity = Tls(**make_certificate(tmp_path)), {"secret": b"sixteen bytes or more"}
    pair = Pair(NodeOptions(page_tokens=16, hosts=["127.0.0.1"]), tls=tls, identity=identity)
    try:
        with ExitStack() as stack:
            early = [stack.enter_context(dial(pair.ports[PURPOSE], tcp=True)) for _ in range(5)]
            assert is_closed(early[0])
            assert not select.select(early[1:], [], [], 0)[0]
            pair.serves()
    finally:
        pair.close()
