"""What broken peers, slow ones and very many do to an instance's control plane: nothing to the others."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from certificates import CAN_MAKE, make_certificate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated.fuzz import damaged
from simulated.halves import announce, close, granted, introduction, report
from simulated.nodes import Instances
from simulated.strangers import deaf, dial, greet, is_closed
from simulated.waiting import wait_for

import transfer.control.connection
import transfer.control.listener
import transfer.fetching
import transfer.serving
from mooncake_connector.log import forget_causes
from transfer.control import pending
from transfer.control.connection import Access, LoopThread, connect
from transfer.control.directory import PURPOSE, look_up
from transfer.control.handshake import Identity
from transfer.control.listener import listen
from transfer.driver import RANK_PURPOSE
from transfer.fetching import Where
from transfer.protocol.messages import MAX_MESSAGE_NBYTES, encode
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions
from transfer.transports.base import TransferError, Unavailable
from transfer.transports.tls import Tls
from transfer.transports.unix import listen_at_port, port_name

P_TABLE, D_TABLE = [7, 2, 9, 4, 1, 0], [3, 0, 5, 1, 2, 6]
NOBODY = Access(Identity())


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


class Pair:
    """A prefill and a decode instance."""

    def __init__(self, timing: Timing | None = None) -> None:
        options = NodeOptions(page_tokens=16, timing=timing or Timing())
        self.prefill, self.decode = (Instances(1, table, options=options) for table in (P_TABLE, D_TABLE))
        self.prefill.fill()
        self.control_port = self.prefill.ranks[0].node.card.port
        self.ports = {PURPOSE: self.prefill.directory.port, RANK_PURPOSE: self.control_port}
        self._served = 0

    def begin(self, name: str) -> None:
        """A request that the decode instance waits for."""
        self.decode.ranks[0].bytes[:] = 0
        self.prefill.open(name)
        self.decode.announce(name, self.prefill.where, computed=False)
        self.decode.grant(name)

    def end(self, name: str, *, computed: bool = False) -> None:
        """It is computed, and arrives."""
        if not computed:
            self.prefill.compute(name)
        self.prefill.finish(name)
        (ended,) = self.decode.fetched()
        assert (ended.transfer, ended.ending) == (name, Ending.DONE), ended
        self.decode.check()
        (sent,) = self.prefill.sent()
        assert (sent.transfer, sent.ending) == (name, Ending.DONE), sent

    def still_serves(self) -> None:
        self._served += 1
        self.begin(f"served {self._served}")
        self.end(f"served {self._served}")

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


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


# Peers that know the secret and say something wrong


def visit(pair: Pair, *frames: bytes) -> None:
    """A consumer's rank that says this and is turned away."""
    with dial(pair.control_port) as connection:
        greet(connection, RANK_PURPOSE, Identity())
        with suppress(OSError):
            for frame in frames:
                connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


INTRODUCTION = framed(encode(introduction()))
SAID = [INTRODUCTION, *(framed(encode(message)) for message in (announce(to=0), granted(to=0), report(), close()))]


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(first=damaged(SAID), then=st.lists(damaged(SAID) | st.binary(max_size=200), max_size=3))
def test_a_consumer_that_says_anything_loses_its_connection_and_no_more(pair, first, then):
    visit(pair, first, *then)


def test_after_all_that_requests_are_served(pair):
    pair.still_serves()


def test_a_malformed_message_is_logged(pair, caplog):
    rank = pair.decode.ranks[0]
    fits = introduction(
        layout=rank.layout, num_layers=4, num_heads=4, endpoints=rank.node._fetching._endpoints, generation=1
    )
    visit(pair, framed(encode(fits)), framed(b"\xc1 nothing"))
    assert [record.getMessage() for record in caplog.records if "not a message" in record.getMessage()]
    pair.still_serves()


# Slow ones, and very many


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
    pair.still_serves()


def test_slow_strangers_are_turned_away_after_a_time_and_others_served_then(monkeypatch, purpose, caplog):
    monkeypatch.setattr(transfer.control.listener, "_STRANGER_S", 0.3)
    pair = Pair()
    try:
        with ExitStack() as stack:
            slow = [stack.enter_context(dial(pair.ports[purpose])) for _ in range(pending.MAX_FROM_ONE)]
            assert all(is_closed(connection) for connection in slow)
            monkeypatch.undo()  # what serves may be slow as well
            pair.still_serves()
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


# What this side asks of others


@pytest.fixture
def loop():
    thread = LoopThread("mooncake-connector-test")
    yield thread
    thread.close()


@pytest.fixture
def silent():
    with deaf() as address:
        yield address


def test_a_listener_that_never_answers_is_given_up_at_the_deadline(loop, silent):
    for ask in (connect(silent, "rank", NOBODY, deadline_s=0.2), look_up(silent, NOBODY, deadline_s=0.2)):
        with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
            loop.run(ask, 20)


def test_a_listener_that_answers_a_byte_at_a_time_is_given_up_at_the_deadline(loop):
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while not writer.is_closing():
                writer.write(b"\x00")
                await writer.drain()
                await asyncio.sleep(0.01)

    async def ask() -> None:
        listener, port = listen_at_port(0, 8)
        async with await asyncio.start_unix_server(drip, sock=listener):
            with pytest.raises(Unavailable):
                await connect(("", port), "rank", NOBODY, deadline_s=0.3)

    loop.run(ask(), 20)


def test_a_directory_that_answers_with_anything_is_not_believed(loop):
    answers = [b"", b"\xc1", b"\x80", encode(introduction()), b"\xdd\xff\xff\xff\xff", bytes(MAX_MESSAGE_NBYTES)]

    async def ask(answer: bytes) -> None:
        async def serve(link) -> None:
            link.send(answer)
            await link.flush(5)

        listener = await listen(("", 0), PURPOSE, NOBODY, serve)
        try:
            with pytest.raises(Unavailable):
                await look_up(("", listener.port), NOBODY, deadline_s=10)
        finally:
            listener.close()

    for answer in answers:
        loop.run(ask(answer), 20)


def test_what_a_peer_does_not_read_is_bounded_and_holds_nobody_up(loop):
    async def run() -> int:
        unread: list[int] = []

        async def serve(link) -> None:
            for _ in range(20):
                link.send(bytes(MAX_MESSAGE_NBYTES))
                unread.append(link._writer.transport.get_write_buffer_size())

        listener = await listen(("", 0), "rank", NOBODY, serve)
        link = await connect(("", listener.port), "rank", NOBODY, deadline_s=10)
        while len(unread) < 20:
            await asyncio.sleep(0.01)
        link.close()
        listener.close()
        return max(unread)

    assert loop.run(run(), 20) <= transfer.control.connection._MAX_UNSENT_NBYTES + MAX_MESSAGE_NBYTES + 4


def test_a_frame_too_large_is_not_read(loop):
    async def run() -> None:
        async def serve(link) -> None:
            link._writer.write((MAX_MESSAGE_NBYTES + 1).to_bytes(4, "little"))
            await link.receive(10)

        listener = await listen(("", 0), "rank", NOBODY, serve)
        link = await connect(("", listener.port), "rank", NOBODY, deadline_s=10)
        with pytest.raises(Unavailable, match=f"at most {MAX_MESSAGE_NBYTES} are read"):
            await link.receive(10)
        link.close()
        listener.close()

    loop.run(run(), 20)


@pytest.mark.parametrize(
    "said",
    [b"\x05\x00\x00", (5).to_bytes(4, "little") + b"half", (1 << 20).to_bytes(4, "little")],
    ids=["half a length", "half a frame", "a large frame that has no place"],
)
def test_a_frame_has_its_time_from_its_first_byte_on(loop, monkeypatch, said):
    """And no earlier: a connection may be silent between frames."""
    monkeypatch.setattr(transfer.control.connection, "_FRAME_S", 0.1)

    async def run() -> None:
        given_up = asyncio.Event()

        async def serve(link) -> None:
            for _ in range(transfer.control.connection.MAX_LARGE):
                await link._large.acquire()
            with pytest.raises(Unavailable):
                await link.receive()
            given_up.set()

        listener = await listen(("", 0), "rank", NOBODY, serve)
        link = await connect(("", listener.port), "rank", NOBODY, deadline_s=10)
        await asyncio.sleep(0.3)
        assert not given_up.is_set()
        link._writer.write(said)
        await asyncio.wait_for(given_up.wait(), 10)
        assert await asyncio.wait_for(link._reader.read(), 10) == b""
        link.close()
        listener.close()

    loop.run(run(), 30)


def test_a_silent_prefill_instance_costs_a_request_its_own_deadline_at_most(silent):
    pair = Pair(Timing(deadline_s=0.5))
    try:
        pair.decode.announce("t", Where(*silent), computed=True)
        (ended,) = pair.decode.fetched()
        assert ended.ending is Ending.EXPIRED, ended
    finally:
        pair.close()


def test_beyond_a_number_of_searches_requests_fail_at_once_and_known_instances_serve_on(silent, monkeypatch, caplog):
    """Whoever sends requests may name any number of addresses, each of which costs a descriptor while it is tried."""
    monkeypatch.setattr(transfer.fetching, "_CONNECT_S", 600.0)
    pair, more, ended = Pair(), 5, []
    node = pair.decode.ranks[0].node
    try:
        pair.still_serves()
        for number in range(transfer.fetching.MAX_SEARCHES + more):
            pair.decode.announce(f"stray {number}", Where(f"127.0.1.{number}", silent[1]), computed=True)
        wait_for(lambda: ended.extend(node.take_fetched()) or len(ended) == more)
        assert {one.ending for one in ended} == {Ending.FAILED}
        assert all("32 others are under way" in one.cause for one in ended)
        pair.still_serves()
    finally:
        pair.close()
    assert len(refusals(caplog)) == 1 and "no search for the prefill instance at" in caplog.text


def test_requests_that_name_another_life_ask_the_directory_once_for_all_of_them(pair, monkeypatch):
    pair.still_serves()
    asked, node, ended = [], pair.decode.ranks[0].node, []

    async def slow(*arguments, **options):
        asked.append(arguments)
        while len(node._fetching._fetches) < 20:
            await asyncio.sleep(0.01)
        return await look_up(*arguments, **options)

    monkeypatch.setattr(transfer.fetching, "look_up", slow)
    for number in range(20):
        where = Where(pair.prefill.where.host, pair.prefill.where.port, f"life {number}")
        pair.decode.announce(f"another life {number}", where, computed=True)
    wait_for(lambda: ended.extend(node.take_fetched()) or len(ended) == 20)
    assert all("is gone: 'engine' answers there" in one.cause for one in ended)
    assert len(asked) == 1
    pair.still_serves()


def test_stale_parameters_of_one_request_do_not_disturb_another(pair):
    pair.begin("under way")
    link_of = pair.decode.ranks[0].node._fetching._links
    wait_for(lambda: link_of)
    links = dict(link_of)
    pair.decode.announce(
        "stale", Where(pair.prefill.where.host, pair.prefill.where.port, "an earlier life"), computed=True
    )
    (ended,) = pair.decode.fetched()
    assert (ended.transfer, ended.ending) == ("stale", Ending.FAILED)
    assert link_of == links and all(link.alive for link in links.values())
    pair.end("under way")


def test_a_prefill_instance_that_closes_every_connection_is_not_stormed(monkeypatch):
    pair, visits = Pair(Timing(deadline_s=2.5)), []

    def refuse(*_: object) -> None:
        visits.append(None)
        raise TransferError("not today")

    monkeypatch.setattr(transfer.serving.Serving, "_meet", refuse)
    try:
        pair.decode.announce("t", pair.prefill.where, computed=False)
        (ended,) = pair.decode.fetched()
        assert ended.ending is Ending.EXPIRED
        assert 2 <= len(visits) <= 6
    finally:
        pair.close()


# Connections that break


def test_a_data_connection_that_broke_is_made_again_for_the_next_transfer(pair):
    pair.still_serves()
    for visitor in pair.prefill.ranks[0].node._serving._visitors.values():
        visitor.data.result().close()
    pair.still_serves()


def test_a_control_connection_that_breaks_in_mid_transfer_costs_no_transfer(monkeypatch):
    pair, may_connect = Pair(), threading.Event()
    monkeypatch.setattr(transfer.fetching, "_RECONNECT_S", 0.01)

    async def late(*arguments, **options):
        if not may_connect.is_set():
            raise Unavailable("not yet")
        return await connect(*arguments, **options)

    try:
        pair.begin("t")
        served = pair.prefill.ranks[0].node._serving
        fetched = pair.decode.ranks[0].node._fetching
        wait_for(lambda: served._links and fetched._links)
        monkeypatch.setattr(transfer.fetching, "connect", late)
        pair.decode.ranks[0].node._thread.post(next(iter(fetched._links.values())).close)
        wait_for(lambda: not served._links and not fetched._links)
        pair.prefill.compute("t", step_s=0.01)
        may_connect.set()
        pair.end("t", computed=True)
    finally:
        pair.close()


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
        assert "an order failed: Send: ZeroDivisionError" in caplog.text
    finally:
        pair.close()


# What the log says of it


def refusals(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_whatever_strangers_say_makes_few_lines_in_the_log(pair, purpose, caplog):
    for length in range(2000, 2040):
        with dial(pair.ports[purpose]) as connection:
            connection.sendall(length.to_bytes(4, "little"))
            assert is_closed(connection)
    assert len(refusals(caplog)) == 1 and "a frame of 2000 bytes" in caplog.text


@pytest.mark.parametrize(
    "said, line",
    [
        (framed(b"\xc1"), "not a message"),
        (framed(encode(announce(to=0))), "Announce before an introduction"),
        ((MAX_MESSAGE_NBYTES + 1).to_bytes(4, "little"), f"a frame of {MAX_MESSAGE_NBYTES + 1} bytes"),
        (framed(encode(introduction())), "model_layers, model_heads, k_dim, v_dim differ"),
    ],
    ids=["no message", "another message", "too large", "another model"],
)
def test_a_peer_that_begins_with_something_else_than_a_proper_introduction_is_logged(pair, caplog, said, line):
    visit(pair, said)
    assert len(refusals(caplog)) == 1 and line in caplog.text


def test_beyond_a_number_of_strangers_the_oldest_goes_and_is_logged_once(monkeypatch, purpose, caplog):
    monkeypatch.setattr(pending, "MAX_FROM_ONE", 4)
    pair = Pair()
    try:
        with ExitStack() as stack:
            connections = [stack.enter_context(dial(pair.ports[purpose])) for _ in range(8)]
            assert all(is_closed(connection) for connection in connections[:4])
            assert not select.select(connections[4:], [], [], 0)[0]
            assert len(refusals(caplog)) == 1
            assert "too many connections have not finished their handshake; the oldest is closed" in caplog.text
    finally:
        pair.close()


@pytest.mark.skipif(not CAN_MAKE, reason="makes its certificates with `openssl`")
def test_strangers_that_have_not_even_begun_with_tls_count(monkeypatch, tmp_path):
    monkeypatch.setattr(pending, "MAX_FROM_ONE", 4)
    monkeypatch.setattr(transfer.control.listener, "_STRANGER_S", 600.0)
    tls, identity = Tls(**make_certificate(tmp_path)), {"secret": b"sixteen bytes or more"}
    options = NodeOptions(page_tokens=16, hosts=["127.0.0.1"])
    prefill, decode = (
        Instances(1, table, tls=tls, identity=identity, options=options) for table in (P_TABLE, D_TABLE)
    )
    prefill.fill()
    try:
        with ExitStack() as stack:
            early = [stack.enter_context(dial(prefill.directory.port, tcp=True)) for _ in range(5)]
            assert is_closed(early[0])
            assert not select.select(early[1:], [], [], 0)[0]
            prefill.open("t")
            prefill.finish("t")
            decode.announce("t", prefill.where, computed=True)
            decode.grant("t")
            assert [ended.ending for ended in decode.fetched()] == [Ending.DONE]
    finally:
        decode.close()
        prefill.close()


def test_closing_with_connections_open_says_nothing(caplog):
    pair = Pair()
    pair.still_serves()
    pair.close()
    assert refusals(caplog) == []


# Closing


def test_a_data_connection_that_failed_and_was_not_needed_says_nothing(caplog):
    """asyncio would, when its future is collected in the middle of something else."""
    pair = Pair()
    layout, serving = pair.decode.ranks[0].layout, pair.prefill.ranks[0].node._serving
    with dial(pair.control_port) as connection:
        greet(connection, RANK_PURPOSE, Identity())
        said = introduction(layout=layout, num_layers=4, num_heads=4, endpoints={}, generation=1)
        connection.sendall(framed(encode(said)))
        wait_for(lambda: any(visitor.data.done() for visitor in list(serving._visitors.values())))
        pair.close()
    serving._visitors.clear()
    gc.collect()
    assert refusals(caplog) == []


def test_a_task_that_loses_a_cancellation_is_cancelled_again():
    """As one in `wait_for` does before Python 3.12, where the result comes at the same time."""
    thread, lost = LoopThread("mooncake-connector-test"), []

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(None)

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        return task

    task = thread.run(begin(), 20)
    thread.close()
    assert lost and task.cancelled() and thread.loop.is_closed()


def test_a_connection_that_comes_while_the_loop_is_closed_is_closed_and_says_nothing(loop):
    said = []
    loop.loop.set_exception_handler(lambda _, context: said.append(context))

    async def run() -> None:
        listener = await listen(("", 0), "rank", NOBODY, lambda link: asyncio.sleep(60))
        reader, writer = await asyncio.open_unix_connection(port_name(listener.port))
        while not listener._tasks:
            await asyncio.sleep(0)
        for task in listener._tasks:
            task.cancel()  # before it has begun
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
        listener.close()

    loop.run(run(), 30)
    assert said == []
