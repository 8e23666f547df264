"""Nodes: everything of `transfer/` together, sockets and threads included, as an engine's adapter drives it."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace

import pytest
from simulated.nodes import TOKENS, endings
from simulated.pair import Pair
from simulated.raw_peer import deaf
from simulated.waiting import wait_for

import transfer.fetching
import transfer.serving
import transfer.session
from transfer.integrity import page_checksums
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import Table
from transfer.protocol.incoming import Where
from transfer.protocol.messages import Close
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions


def options(granularity: Granularity = Granularity.LAYER, transport: str = "", **kwargs) -> NodeOptions:
    only = {"transports": [transport], "hosts": ["127.0.0.1"] if transport == "tcp" else []} if transport else {}
    return NodeOptions(page_tokens=16, bounds=Bounds(fixed=granularity), **only, **kwargs)


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("transport", ["cma", "shm", "tcp"])
@pytest.mark.parametrize("source_tp, destination_tp", [(1, 1), (2, 1), (1, 2), (8, 2)])
def test_kv_arrives_in_the_sequential_order(make, source_tp, destination_tp, transport, granularity):
    prefill, decode = make
    p = prefill(source_tp, options=options(granularity, transport))
    d = decode(destination_tp, options=options(transport=transport))
    p.prefill("t")
    d.fetch("t", p.where, computed=True)
    assert endings(d.fetched()) == {Ending.DONE}
    d.check()
    sent = p.sent()
    assert endings(sent) == {Ending.DONE}
    assert {ended.transport for ended in sent} - {""} == {transport}


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("grant_first", [True, False])
def test_kv_arrives_in_the_concurrent_order(make, granularity, grant_first):
    prefill, decode = make
    p, d = prefill(2, options=options(granularity)), decode()
    d.announce("t", Where("127.0.0.1", p.where.port), computed=False)
    if grant_first:
        d.grant("t")
        known = [rank.node._serving.producer._transfers for rank in p.ranks]
        wait_for(lambda: all(known))
    p.open("t")
    p.compute("t", step_s=0.005)
    if not grant_first:
        d.grant("t")
    p.finish("t")
    assert endings(d.fetched()) == endings(p.sent()) == {Ending.DONE}
    d.check()


def test_only_the_rest_of_a_request_travels(make):
    prefill, decode = make
    p, d = prefill(), decode()
    p.prefill("t")
    d.announce("t", p.where, computed=True)
    d.grant("t", first_token=24)
    (ended,) = d.fetched()
    assert ended.ending is Ending.DONE
    d.check(first_token=24)
    (sent,) = p.sent()
    assert ended.nbytes == sent.nbytes == 4 * 4 * 16 * 2 * (TOKENS - 24)


def test_an_instance_may_fetch_from_itself(make):
    prefill, _ = make
    p = prefill()
    p.prefill("t")
    p.announce("t", p.where, computed=True)
    (rank,) = p.ranks
    rank.node.grant("t", Table(0, 32, [6, 3, 5, 8]))
    assert endings(p.fetched()) == endings(p.sent()) == {Ending.DONE}
    (part,) = rank.parts
    part.table = [6, 3, 5, 8]
    values, copies = part.places()
    assert (part.bytes[copies] == values).all()


def test_many_transfers_at_once(make):
    prefill, decode = make
    p, d = prefill(), decode()
    names = [f"t{n}" for n in range(50)]
    for name in names:
        d.announce(name, p.where, computed=False)
        p.open(name)
    for name in names:
        p.compute(name)
        p.finish(name)
        d.grant(name)
    found = []
    wait_for(lambda: found.extend(d.ranks[0].node.take_fetched()) or len(found) == len(names))
    assert {ended.name for ended in found} == set(names)
    assert endings(found) == {Ending.DONE}
    d.check()


@pytest.mark.parametrize(
    "there, here, life, cause",
    [
        ({"engine_id": "second life"}, {}, "first life", "'first life' is gone: 'second life' answers"),
        ({}, {}, "engine", "not known"),
        ({"identity": {"secret": b"right" * 4}}, {"identity": {"secret": b"wrong" * 4}}, "engine", "secret"),
        ({"identity": {"compatibility": b"a"}}, {"identity": {"compatibility": b"b"}}, "engine", "compatibility"),
    ],
    ids=["another life", "an unknown transfer", "another secret", "another configuration"],
)
def test_a_request_that_the_prefill_instance_does_not_serve_fails_at_once(make, there, here, life, cause):
    prefill, decode = make
    p, d = prefill(**there), decode(**here)
    d.fetch("t", replace(p.where, engine_id=life), computed=True)
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and cause in ended.cause


def test_an_unreachable_instance_does_not_hold_up_the_others(make, monkeypatch):
    monkeypatch.setattr(transfer.fetching, "_UNREACHABLE_S", 600.0)
    prefill, decode = make
    p, d = prefill(), decode()
    with deaf() as address:
        where = Where(*address)
        d.announce("silent", where, computed=True)
        p.prefill("t")
        d.fetch("t", p.where, computed=True)
        (first,) = d.fetched()
        assert (first.name, first.ending) == ("t", Ending.DONE)
    (second,) = d.fetched()
    assert (second.name, second.ending) == ("silent", Ending.FAILED)
    d.announce("again", where, computed=True)
    (third,) = d.fetched()
    assert "a moment ago" in third.cause


def test_what_nobody_wants_any_more_is_released_on_both_sides(make):
    prefill, decode = make
    p, d = prefill(), decode()
    for granted in (False, True):
        name = f"t{granted}"
        p.open(name)
        d.announce(name, p.where, computed=False)
        if granted:
            d.grant(name)
        d.drop(name)
        assert endings(d.fetched()) == {Ending.CANCELLED}
        p.finish(name)
        assert endings(p.sent()) == {Ending.CANCELLED}


def test_nothing_is_written_once_the_consumer_has_taken_its_grant_back(make):
    prefill, decode = make
    p, d = prefill(), decode()
    d.fetch("t", p.where, computed=False)
    node = d.ranks[0].node
    wait_for(lambda: node.incoming["t"].memory)
    node._fetching._memory.revoke(node.incoming["t"].memory)  # and no message says so
    p.prefill("t")
    assert endings(d.fetched()) == endings(p.sent()) == {Ending.FAILED}
    assert not d.ranks[0].bytes.any()


def test_the_producer_gives_up(make):
    prefill, decode = make
    p, d = prefill(), decode()
    p.open("t")
    d.fetch("t", p.where, computed=False)
    p.compute("t", [20])
    p.ranks[0].node.cancel("t", "the request was aborted")
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "aborted" in ended.cause
    assert endings(p.sent()) == {Ending.CANCELLED}


def test_prefill_that_is_preempted_before_anything_was_sent_goes_on(make):
    prefill, decode = make
    p, d = prefill(options=options(Granularity.FULL)), decode()
    p.open("t")
    d.fetch("t", p.where, computed=False)
    p.compute("t", [20])
    p.ranks[0].node.preempted("t")
    p.ranks[0].bytes[:] = 0
    time.sleep(0.05)  # for what should not be sent
    p.fill()
    p.compute("t")
    p.finish("t")
    assert endings(d.fetched()) == {Ending.DONE}
    d.check()


def test_prefill_that_is_preempted_when_something_was_sent_ends_the_transfer(make):
    prefill, decode = make
    p, d = prefill(options=options(Granularity.CHUNK)), decode()
    p.open("t")
    d.fetch("t", p.where, computed=False)
    p.compute("t", [24])
    wait_for(d.ranks[0].bytes.any)
    p.ranks[0].node.preempted("t")
    assert endings(d.fetched()) == {Ending.FAILED}
    p.finish("t")
    assert endings(p.sent()) <= {Ending.CANCELLED, Ending.FAILED}  # a write may have been under way


def test_blocks_that_were_taken_back_while_they_are_sent_never_count(make, monkeypatch):
    """The engine reuses them at once; bytes and checksums may then agree on somebody else's KV."""
    prefill, decode = make
    p, d = prefill(options=options(Granularity.CHUNK)), decode()
    before_sending, go_on = threading.Event(), threading.Event()
    send = transfer.serving._send

    def late(*args):
        before_sending.set()
        assert go_on.wait(60)
        return send(*args)

    monkeypatch.setattr(transfer.serving, "_send", late)
    p.open("t")
    d.fetch("t", p.where, computed=False)
    p.compute("t", [TOKENS])
    assert before_sending.wait(60)
    p.ranks[0].node.preempted("t")
    p.ranks[0].bytes[:] = 0xEE
    go_on.set()
    assert endings(d.fetched()) == {Ending.FAILED}


@pytest.mark.parametrize("source_tp", [1, 2])
def test_connections_that_break_when_all_has_arrived_do_not_leave_prefill_with_its_blocks(make, monkeypatch, source_tp):
    """They take the consumer's word to one rank that it is done; that has to come again over another connection."""
    monkeypatch.setattr(transfer.fetching, "_RECONNECT_S", 0.01)
    prefill, decode = make
    timing = Timing(lease_s=60, retry_s=0.2)
    p, d = prefill(source_tp, options=options(timing=timing)), decode(options=options(timing=timing))
    p.open("t")
    d.fetch("t", p.where, computed=False)
    fetched = d.ranks[0].node._fetching
    send, lost_by = fetched._send, []

    def close_all():
        for link in list(fetched._links.values()):
            link.close()

    def lose(peer, message):
        if isinstance(message, Close) and not lost_by:
            lost_by.append(peer)
            fetched._loop.call_later(0.05, close_all)  # the other rank has confirmed by then, and none is repeated
        else:
            send(peer, message)

    monkeypatch.setattr(fetched, "_send", lose)
    p.compute("t")
    p.finish("t")
    assert endings(d.fetched()) == {Ending.DONE}
    assert endings(p.sent()) == {Ending.DONE} and lost_by


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_closing_returns_when_no_thread_reads_the_engine_s_memory(make, monkeypatch, side):
    """The engine unmaps it next."""
    prefill, decode = make
    module = {"prefill": transfer.serving, "decode": transfer.fetching}[side]
    hashed, hashing, inside = page_checksums, threading.Event(), []

    def hash_slowly(*args):
        inside.append(args)
        hashing.set()
        time.sleep(0.3)
        try:
            return hashed(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(module, "page_checksums", hash_slowly)
    p, d = prefill(), decode()
    p.prefill("t")
    d.fetch("t", p.where, computed=True)
    assert hashing.wait(60)
    (p if side == "prefill" else d).ranks[0].node.close()
    assert not inside


def test_a_thread_that_hangs_keeps_no_engine_from_ending(make, monkeypatch, caplog):
    """As one does that reads from a device which has stopped."""
    prefill, decode = make
    hashing, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(transfer.session, "_END_S", 0.05)
    monkeypatch.setattr(transfer.serving, "page_checksums", lambda *args: hashing.set() or (go_on.wait(60) and []))
    p, d = prefill(), decode()
    node = p.ranks[0].node
    p.prefill("t")
    d.fetch("t", p.where, computed=True)
    assert hashing.wait(60)
    node.close()
    assert "the engine gets its memory back" in caplog.text and not go_on.is_set()
    assert all(thread.daemon for executor in node._executors for thread in executor._threads), "a process would wait"
    go_on.set()
    wait_for(lambda: not any(thread.is_alive() for executor in node._executors for thread in executor._threads))


def test_closing_leaves_no_thread_and_no_descriptor():
    def one() -> None:
        pair = Pair()
        pair.serves()
        for _ in range(2):
            pair.close()  # the decode instance first, while it has connections

    def counts() -> tuple[int, int]:
        wait_for(lambda: not any("mooncake" in thread.name for thread in threading.enumerate()))
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    gc.disable()  # what it would close later counts
    try:
        one()
        before = counts()
        for _ in range(3):
            one()
        assert counts() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("granted, ending", [(False, Ending.EXPIRED), (True, Ending.FAILED)])
def test_a_consumer_that_is_killed_does_not_hold_blocks_beyond_the_lease(make, granted, ending):
    """Nor until then, where something is to be written to it."""
    prefill, decode = make
    lease_s = 30.0 if granted else 1.0
    p = prefill(options=NodeOptions(timing=Timing(lease_s=lease_s, heartbeat_s=0.2)))
    d = decode()
    p.open("t")
    d.announce("t", p.where, computed=False)
    if granted:
        d.grant("t")
    known = p.ranks[0].node._serving.producer._transfers
    wait_for(
        lambda: any(peer.granted or not granted for one in list(known.values()) for peer in list(one.sessions.values()))
    )
    d.close()
    p.finish("t")
    assert endings(p.sent()) == {ending}
