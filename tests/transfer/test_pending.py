"""Connections that have not finished their handshake: how long each may take, how many there may be, what they cost."""

from __future__ import annotations

import os
import select
import time
from contextlib import ExitStack, suppress

import pytest
from certificates import CAN_MAKE, make_certificate
from simulated.raw_peer import dial, is_closed, resident_nbytes, tcp_port
from simulated.waiting import wait_for

import transfer.control.listener
from transfer.control import pending
from transfer.control.directory import PURPOSE
from transfer.control.handshake import Client, Identity
from transfer.driver import RANK_PURPOSE
from transfer.session import NodeOptions
from transfer.testing.memory import MIB
from transfer.transports.tls import Tls

THOUSAND = 1000


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def over(kind: str, tmp_path) -> dict:
    """How a pair is reached: over `unix` sockets, `tcp` or `tls`."""
    if kind == "unix":
        return {"options": NodeOptions(transports=["cma", "shm"], page_tokens=16)}
    if kind == "tls" and not CAN_MAKE:
        pytest.skip("makes its certificates with `openssl`")
    options = NodeOptions(transports=["tcp"], hosts=["127.0.0.1"], page_tokens=16)
    return {"options": options, "tls": Tls(**make_certificate(tmp_path)) if kind == "tls" else None}


@pytest.mark.parametrize("says", [b"", (1000).to_bytes(4, "little") + b"part"], ids=["nothing", "part of a frame"])
@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_thousand_pending_handshakes_disturb_no_request_and_lock_nobody_out(make_pair, tmp_path, kind, says):
    """At the directory, at a rank's port for control and, over TCP, at its port for data."""
    pair = make_pair(**over(kind, tmp_path))
    ports, is_tcp = list(pair.ports.values()), kind != "unix"
    if is_tcp:
        ports.append(tcp_port(pair.decode.ranks[0].node._transports.listen()["tcp"]))
    pair.begin("under way")
    wait_for(lambda: pair.prefill.ranks[0].node._serving._visitors)
    before, memory = open_files(), resident_nbytes()
    with ExitStack() as stack:
        for number in range(THOUSAND):
            connection = stack.enter_context(dial(ports[number % len(ports)], tcp=is_tcp))
            with suppress(OSError):
                connection.sendall(says)
        pair.end("under way")
        pair.serves()
        wait_for(lambda: open_files() - before <= THOUSAND + len(ports) * pending.MAX_PENDING + 40)
        assert resident_nbytes() - memory < 128 * MIB
    wait_for(lambda: open_files() - before <= 40)
    pair.serves()


@pytest.mark.parametrize("purpose", [PURPOSE, RANK_PURPOSE])
def test_slow_handshakes_are_given_up_after_a_time_and_others_served_then(make_pair, monkeypatch, purpose, caplog):
    """Also one that goes on byte by byte."""
    monkeypatch.setattr(transfer.control.listener, "_HANDSHAKE_S", 0.3)
    pair = make_pair()
    with ExitStack() as stack:
        slow = [stack.enter_context(dial(pair.ports[purpose])) for _ in range(pending.MAX_FROM_ONE)]
        with pytest.raises(OSError):
            for byte in Client(Identity(), purpose).start():
                slow[-1].sendall(bytes([byte]))
                time.sleep(0.1)
        assert all(is_closed(connection) for connection in slow)
        wait_for(lambda: "no handshake within 0.3 s" in caplog.text)  # a connection is closed first
        monkeypatch.undo()  # what serves may be slow as well
        pair.serves()


@pytest.mark.parametrize("kind, purpose", [("unix", PURPOSE), ("unix", RANK_PURPOSE), ("tls", PURPOSE)])
def test_beyond_a_number_of_them_the_oldest_goes_and_is_logged_once(
    make_pair, monkeypatch, tmp_path, kind, purpose, caplog
):
    """Those that have not even begun with TLS count."""
    monkeypatch.setattr(pending, "MAX_FROM_ONE", 4)
    monkeypatch.setattr(transfer.control.listener, "_HANDSHAKE_S", 600.0)
    pair = make_pair(**over(kind, tmp_path))
    with ExitStack() as stack:
        connections = [stack.enter_context(dial(pair.ports[purpose], tcp=kind == "tls")) for _ in range(8)]
        assert all(is_closed(connection) for connection in connections[:4])
        assert not select.select(connections[4:], [], [], 0)[0]
        wait_for(lambda: caplog.records)
        assert len(caplog.records) == 1
        assert "too many connections have not finished their handshake; the oldest is closed" in caplog.text
        pair.serves()


def test_places_go_to_the_newest_and_are_taken_from_whoever_has_most():
    places: pending.PendingHandshakes[str] = pending.PendingHandshakes()
    assert [places.enter(f"a{n}", "a") for n in range(pending.MAX_FROM_ONE)] == [None] * pending.MAX_FROM_ONE
    assert places.enter("more", "a") == "a0"
    few = pending.MAX_PENDING - pending.MAX_FROM_ONE
    assert [places.enter(f"b{n}", f"b{n}") for n in range(few)] == [None] * few
    assert places.enter("late", "c") == "a1", "of the address that has the most, not the honest one"
    places.leave("b0")
    assert places.enter("later", "d") is None and len(places) == pending.MAX_PENDING
    assert pending.origin_of("2001:db8::1") == pending.origin_of("2001:db8::2")
    assert pending.origin_of("10.0.0.1") != pending.origin_of("10.0.0.2")
