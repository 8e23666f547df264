"""Nodes: everything of `transfer/` together, sockets and threads included, as an engine's adapter drives it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from simulated.nodes import TOKENS, Instances, spoil_arrivals
from simulated.strangers import deaf

import transfer.fetching
import transfer.serving
from transfer.plan.granularity import Bounds, Granularity
from transfer.plan.layout import Table
from transfer.protocol.consumer import Where
from transfer.protocol.messages import Close
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions
from transfer.transports.base import TransferError

P_TABLE, D_TABLE = [7, 2, 9, 4, 1, 0], [3, 0, 5, 1]
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def make():
    made = []

    def prefill(tp_size: int = 1, **kwargs) -> Instances:
        made.append(Instances(tp_size, P_TABLE, **kwargs))
        made[-1].fill()
        return made[-1]

    def decode(tp_size: int = 1, **kwargs) -> Instances:
        made.append(Instances(tp_size, D_TABLE, block_tokens=12, order="BLHN", **kwargs))
        return made[-1]

    yield prefill, decode
    for instance in made:
        instance.close()


def endings(instance: Instances, side: str) -> set[Ending]:
    return {ended.ending for ended in getattr(instance, side)()}


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
    p.open("t")
    p.compute("t")
    p.finish("t")
    d.announce("t", p.where, computed=True)
    d.grant("t")
    assert endings(d, "fetched") == {Ending.DONE}
    d.check()
    sent = p.sent()
    assert {ended.ending for ended in sent} == {Ending.DONE}
    assert {ended.transport for ended in sent} - {""} == {transport}


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("grant_first", [True, False])
def test_kv_arrives_in_the_concurrent_order(make, granularity, grant_first):
    prefill, decode = make
    p, d = prefill(2, options=options(granularity)), decode()
    d.announce("t", Where("127.0.0.1", p.where.port), computed=False)
    if grant_first:
        d.grant("t")
        time.sleep(0.05)
    p.open("t")
    p.compute("t", step_s=0.005)
    if not grant_first:
        d.grant("t")
    p.finish("t")
    assert endings(d, "fetched") == {Ending.DONE}
    assert endings(p, "sent") == {Ending.DONE}
    d.check()


def test_only_the_rest_of_a_request_travels(make):
    prefill, decode = make
    p, d = prefill(), decode()
    p.open("t")
    p.finish("t")
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
    p.open("t")
    p.finish("t")
    p.announce("t", p.where, computed=True)
    (rank,) = p.ranks
    rank.node.grant("t", Table(0, 32, [6, 3, 5, 8]))
    assert endings(p, "fetched") == {Ending.DONE}
    assert endings(p, "sent") == {Ending.DONE}
    rank.table = [6, 3, 5, 8]
    values, copies = rank.places()
    assert (rank.bytes[copies] == values).all()


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
    end_s, found = time.monotonic() + 20, []
    while len(found) < len(names) and time.monotonic() < end_s:
        found += d.ranks[0].node.take_fetched()
        time.sleep(0.005)
    assert {ended.name for ended in found} == set(names)
    assert {ended.ending for ended in found} == {Ending.DONE}
    d.check()


def test_another_life_of_the_instance_does_not_have_the_kv(make):
    prefill, decode = make
    p, d = prefill(engine_id="second life"), decode()
    d.announce("t", Where("127.0.0.1", p.where.port, "first life"), computed=True)
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED
    assert "'first life' is gone: 'second life' answers" in ended.cause


def test_a_transfer_that_the_producer_does_not_know_fails_at_once(make):
    prefill, decode = make
    p, d = prefill(), decode()
    d.announce("t", p.where, computed=True)
    d.grant("t")
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "not known" in ended.cause


def test_an_unreachable_instance_does_not_hold_up_the_others(make, monkeypatch):
    monkeypatch.setattr(transfer.fetching, "_UNREACHABLE_S", 600.0)
    prefill, decode = make
    p, d = prefill(), decode()
    with deaf() as address:
        where = Where(*address)
        d.announce("silent", where, computed=True)
        p.open("t")
        p.finish("t")
        d.announce("t", p.where, computed=True)
        d.grant("t")
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
        assert endings(d, "fetched") == {Ending.CANCELLED}
        p.finish(name)
        assert endings(p, "sent") == {Ending.CANCELLED}


def test_the_producer_gives_up(make):
    prefill, decode = make
    p, d = prefill(), decode()
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
    p.compute("t", [20])
    p.ranks[0].node.cancel("t", "the request was aborted")
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "aborted" in ended.cause
    assert endings(p, "sent") == {Ending.CANCELLED}


def test_prefill_that_is_preempted_before_anything_was_sent_goes_on(make):
    prefill, decode = make
    p, d = prefill(options=options(Granularity.FULL)), decode()
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
    p.compute("t", [20])
    p.ranks[0].node.preempted("t")
    p.ranks[0].bytes[:] = 0
    time.sleep(0.05)
    p.fill()
    p.compute("t")
    p.finish("t")
    assert endings(d, "fetched") == {Ending.DONE}
    d.check()


def test_prefill_that_is_preempted_when_something_was_sent_ends_the_transfer(make):
    prefill, decode = make
    p, d = prefill(options=options(Granularity.CHUNK)), decode()
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
    p.compute("t", [24])
    end_s = time.monotonic() + 10
    while not d.ranks[0].bytes.any() and time.monotonic() < end_s:
        time.sleep(0.001)
    p.ranks[0].node.preempted("t")
    assert endings(d, "fetched") == {Ending.FAILED}
    p.finish("t")
    assert endings(p, "sent") <= {Ending.CANCELLED, Ending.FAILED}  # a write may have been under way


def test_blocks_that_were_taken_back_while_they_are_sent_never_count(make, monkeypatch):
    """The engine reuses them at once; bytes and checksums may then agree on somebody else's KV."""
    prefill, decode = make
    p, d = prefill(options=options(Granularity.CHUNK)), decode()
    before_sending, go_on = threading.Event(), threading.Event()
    send = transfer.serving._send

    def late(*args):
        before_sending.set()
        assert go_on.wait(10)
        return send(*args)

    monkeypatch.setattr(transfer.serving, "_send", late)
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
    p.compute("t", [TOKENS])
    assert before_sending.wait(10)
    p.ranks[0].node.preempted("t")
    p.ranks[0].bytes[:] = 0xEE
    go_on.set()
    assert endings(d, "fetched") == {Ending.FAILED}


@pytest.mark.parametrize("times, ending", [(1, Ending.DONE), (2, Ending.FAILED)])
def test_wrong_bytes_are_sent_once_more_and_then_given_up(make, monkeypatch, times, ending):
    prefill, decode = make
    p, d = prefill(options=options(Granularity.FULL)), decode()
    spoil_arrivals(monkeypatch, d, times)
    p.open("t")
    p.finish("t")
    d.announce("t", p.where, computed=True)
    d.grant("t")
    assert endings(d, "fetched") == {ending}
    if ending is Ending.DONE:
        d.check()


def test_a_secret_is_asked_for(make):
    prefill, decode = make
    p = prefill(identity={"secret": b"right" * 4})
    d, stranger = decode(identity={"secret": b"right" * 4}), decode(identity={"secret": b"wrong" * 4})
    p.open("t")
    p.finish("t")
    stranger.announce("t", p.where, computed=True)
    (ended,) = stranger.fetched()
    assert ended.ending is Ending.FAILED and "secret" in ended.cause
    d.announce("t", p.where, computed=True)
    d.grant("t")
    assert endings(d, "fetched") == {Ending.DONE}
    with pytest.raises(TransferError, match="no shared secret is set"):
        prefill(identity={"secret": b""}, options=NodeOptions(hosts=["192.0.2.1"]))


def test_instances_that_do_not_fit_are_told_apart(make):
    prefill, decode = make
    p, d = prefill(identity={"compatibility": b"one"}), decode(identity={"compatibility": b"other"})
    d.announce("t", p.where, computed=True)
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "compatibility" in ended.cause


def test_a_connection_that_breaks_is_made_again(make):
    prefill, decode = make
    p, d = prefill(options=options(Granularity.FULL)), decode()
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
    links = d.ranks[0].node._fetching._links
    end_s = time.monotonic() + 10
    while not links and time.monotonic() < end_s:
        time.sleep(0.005)
    (link,) = links.values()
    d.ranks[0].node._thread.post(link.close)
    while link in links.values() and time.monotonic() < end_s:
        time.sleep(0.005)
    p.compute("t")
    p.finish("t")
    assert endings(d, "fetched") == {Ending.DONE}
    d.check()


@pytest.mark.parametrize("source_tp", [1, 2])
def test_connections_that_break_when_all_has_arrived_do_not_leave_prefill_with_its_blocks(make, monkeypatch, source_tp):
    """They take the consumer's word to one rank that it is done; that has to come again over another connection."""
    monkeypatch.setattr(transfer.fetching, "_RECONNECT_S", 0.01)
    prefill, decode = make
    timing = Timing(lease_s=20, retry_s=0.2)
    p, d = prefill(source_tp, options=options(timing=timing)), decode(options=options(timing=timing))
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
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
    assert endings(d, "fetched") == {Ending.DONE}
    assert endings(p, "sent") == {Ending.DONE} and lost_by


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_closing_returns_when_no_thread_reads_the_engine_s_memory(make, monkeypatch, side):
    """The engine unmaps it next."""
    prefill, decode = make
    module, name = {
        "prefill": (transfer.serving, "page_checksums"),
        "decode": (transfer.fetching, "wrong_pages"),
    }[side]
    hashed, hashing, inside = getattr(module, name), threading.Event(), []

    def hash_slowly(*args):
        inside.append(args)
        hashing.set()
        time.sleep(0.3)
        try:
            return hashed(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(module, name, hash_slowly)
    p, d = prefill(), decode()
    p.open("t")
    d.announce("t", p.where, computed=False)
    d.grant("t")
    p.compute("t")
    p.finish("t")
    assert hashing.wait(10)
    (p if side == "prefill" else d).ranks[0].node.close()
    assert not inside


def test_closing_leaves_no_thread_and_no_descriptor():
    def one() -> None:
        p, d = Instances(1, P_TABLE), Instances(1, D_TABLE, block_tokens=12)
        p.fill()
        p.open("t")
        p.finish("t")
        d.announce("t", p.where, computed=True)
        d.grant("t")
        assert endings(d, "fetched") == {Ending.DONE}
        for instance in (d, p):  # the decode instance while it has connections
            instance.close()
            instance.close()

    def counts() -> tuple[int, int]:
        end_s = time.monotonic() + 10
        while any("mooncake" in thread.name for thread in threading.enumerate()) and time.monotonic() < end_s:
            time.sleep(0.01)
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


# Processes that die


class PrefillProcess:
    """A prefill instance that can be killed and stopped."""

    def __init__(self, port: int = 0, lease_s: float = 30.0, step_s: float = 0.05) -> None:
        command = [sys.executable, "-m", "simulated.prefill_process", str(port), str(lease_s), str(step_s)]
        self._process = subprocess.Popen(
            command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        port_text, engine_id = self.line().split()
        self.where = Where("127.0.0.1", int(port_text), engine_id)

    def compute(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def processes():
    started = []

    def start(**kwargs) -> PrefillProcess:
        started.append(PrefillProcess(**kwargs))
        return started[-1]

    yield start
    for process in started:
        process.end()


@pytest.mark.slow
def test_a_producer_that_is_killed_fails_its_transfers_at_once_and_serves_again_on_its_port(make, processes):
    _, decode = make
    d = decode()
    first = processes(step_s=0.5)
    d.announce("t", first.where, computed=False)
    d.grant("t")
    first.compute("t")
    end_s = time.monotonic() + 10
    while not d.ranks[0].bytes.any() and time.monotonic() < end_s:
        time.sleep(0.005)
    first.end()
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "gone" in ended.cause  # and not at the lease
    second = processes(port=first.where.port)
    second.compute("u")
    d.announce("u", second.where, computed=False)
    d.grant("u")
    assert endings(d, "fetched") == {Ending.DONE}
    d.check()
    d.announce("t", first.where, computed=True)  # a late request of the earlier life
    assert endings(d, "fetched") == {Ending.FAILED}


@pytest.mark.slow
def test_a_producer_that_is_stopped_is_given_up_and_writes_nothing_when_it_wakes(make, processes):
    _, decode = make
    timing = Timing(lease_s=2.0, heartbeat_s=0.3, retry_s=0.2)
    d = decode(options=NodeOptions(page_tokens=16, timing=timing))
    p = processes(lease_s=60.0, step_s=0.2)
    d.announce("t", p.where, computed=False)
    d.grant("t")
    p.compute("t")
    end_s = time.monotonic() + 10
    while not d.ranks[0].bytes.any() and time.monotonic() < end_s:
        time.sleep(0.005)
    p.signal(signal.SIGSTOP)
    (ended,) = d.fetched()
    assert ended.ending is Ending.FAILED and "said nothing" in ended.cause
    d.ranks[0].bytes[:] = 0
    p.signal(signal.SIGCONT)
    said = {p.line(), p.line()}
    assert said in ({"computed t", "sent t cancelled"}, {"computed t", "sent t failed"})  # a write was under way
    assert not d.ranks[0].bytes.any()


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
    end_s = time.monotonic() + 10
    while not any(peer.granted or not granted for one in list(known.values()) for peer in list(one.sessions.values())):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    d.close()
    p.finish("t")
    assert endings(p, "sent") == {ending}
