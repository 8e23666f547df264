"""What this side asks of others that are slow, silent, gone or confused, and links that break: a bounded time."""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from simulated.fuzz import framed
from simulated.nodes import Instances
from simulated.pair import P_TABLE, Pair
from simulated.raw_peer import deaf, dial, greet
from simulated.sides import introduction
from simulated.waiting import wait_for

import transfer.control.connection
import transfer.control.listener
import transfer.fetching
import transfer.serving
from transfer.control.connection import Access, LoopThread, connect
from transfer.control.directory import PURPOSE, look_up
from transfer.control.handshake import Identity
from transfer.control.listener import listen
from transfer.driver import RANK_PURPOSE
from transfer.protocol.incoming import Where
from transfer.protocol.messages import MAX_MESSAGE_NBYTES, encode
from transfer.protocol.orders import Ending, Timing
from transfer.session import NodeOptions
from transfer.transports.base import TransferError, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.unix import listen_at_port, port_name

pytestmark = pytest.mark.slow

NOBODY = Access(Identity())


# What this side asks of others


@pytest.fixture
def loop():
    thread = LoopThread("mooncake-connector-test")
    yield thread
    thread.close()


@asynccontextmanager
async def link_to(serve):
    """A connection to a listener that serves it so."""
    listener = await listen(("", 0), "rank", NOBODY, serve)
    link = await connect(("", listener.port), "rank", NOBODY, deadline_s=30)
    yield link
    link.close()
    listener.close()


@pytest.fixture
def silent():
    with deaf() as address:
        yield address


def test_a_listener_that_never_answers_is_given_up_at_the_deadline(loop, silent):
    for ask in (connect(silent, "rank", NOBODY, deadline_s=0.2), look_up(silent, NOBODY, deadline_s=0.2)):
        with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
            loop.run(ask, 60)


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

    loop.run(ask(), 60)


def test_a_directory_that_answers_with_anything_is_not_believed(loop):
    answers = [b"", b"\xc1", b"\x80", encode(introduction()), b"\xdd\xff\xff\xff\xff", bytes(MAX_MESSAGE_NBYTES)]

    async def ask(answer: bytes) -> None:
        async def serve(link) -> None:
            link.send(answer)
            await link.flush(5)

        listener = await listen(("", 0), PURPOSE, NOBODY, serve)
        try:
            with pytest.raises(Unavailable):
                await look_up(("", listener.port), NOBODY, deadline_s=30)
        finally:
            listener.close()

    for answer in answers:
        loop.run(ask(answer), 60)


def test_what_a_peer_does_not_read_is_bounded_and_holds_nobody_up(loop):
    async def run() -> int:
        unread: list[int] = []

        async def serve(link) -> None:
            for _ in range(20):
                link.send(bytes(MAX_MESSAGE_NBYTES))
                unread.append(link._writer.transport.get_write_buffer_size())

        async with link_to(serve):
            while len(unread) < 20:
                await asyncio.sleep(0.01)
        return max(unread)

    assert loop.run(run(), 60) <= transfer.control.connection._MAX_UNSENT_NBYTES + MAX_MESSAGE_NBYTES + 4


def test_a_frame_too_large_is_not_read(loop):
    async def run() -> None:
        async def serve(link) -> None:
            link._writer.write((MAX_MESSAGE_NBYTES + 1).to_bytes(4, "little"))
            await link.receive(30)

        async with link_to(serve) as link:
            with pytest.raises(Unavailable, match=f"at most {MAX_MESSAGE_NBYTES} are read"):
                await link.receive(30)

    loop.run(run(), 60)


@pytest.mark.parametrize(
    "said",
    [b"\x05\x00\x00", (5).to_bytes(4, "little") + b"part", (1 << 20).to_bytes(4, "little")],
    ids=["part of a length", "part of a frame", "a large frame that has no place"],
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

        async with link_to(serve) as link:
            await asyncio.sleep(0.3)
            assert not given_up.is_set()
            link._writer.write(said)
            await asyncio.wait_for(given_up.wait(), 30)
            assert await asyncio.wait_for(link._reader.read(), 30) == b""

    loop.run(run(), 60)


def test_a_silent_prefill_instance_costs_a_request_its_own_deadline_at_most(make_pair, silent):
    pair = make_pair(NodeOptions(page_tokens=16, timing=Timing(deadline_s=0.5)))
    pair.decode.announce("t", Where(*silent), computed=True)
    (ended,) = pair.decode.fetched()
    assert ended.ending is Ending.EXPIRED, ended


def test_beyond_a_number_of_searches_requests_fail_at_once_and_known_instances_serve_on(
    make_pair, silent, monkeypatch, caplog
):
    """Whoever sends requests may name any number of addresses, each of which costs a descriptor while it is tried."""
    monkeypatch.setattr(transfer.fetching, "_CONNECT_S", 600.0)
    pair, more, ended = make_pair(), 5, []
    node = pair.decode.ranks[0].node
    pair.serves()
    for number in range(transfer.fetching.MAX_SEARCHES + more):
        pair.decode.announce(f"stray {number}", Where(f"127.0.1.{number}", silent[1]), computed=True)
    wait_for(lambda: ended.extend(node.take_fetched()) or len(ended) == more)
    assert {one.ending for one in ended} == {Ending.FAILED}
    assert all("32 others are under way" in one.cause for one in ended)
    pair.serves()
    assert len(caplog.records) == 1 and "no search for the prefill instance at" in caplog.text


def test_requests_that_name_another_life_ask_the_directory_once_for_all_of_them(pair, monkeypatch):
    pair.serves()
    asked, node, ended = [], pair.decode.ranks[0].node, []

    async def slow(*arguments, **options):
        asked.append(arguments)
        while len(node.incoming) < 20:
            await asyncio.sleep(0.01)
        return await look_up(*arguments, **options)

    monkeypatch.setattr(transfer.fetching, "look_up", slow)
    for number in range(20):
        where = replace(pair.prefill.where, engine_id=f"life {number}")
        pair.decode.announce(f"another life {number}", where, computed=True)
    wait_for(lambda: ended.extend(node.take_fetched()) or len(ended) == 20)
    assert all("is gone: 'engine' answers there" in one.cause for one in ended)
    assert len(asked) == 1
    pair.serves()


def test_stale_parameters_of_one_request_do_not_disturb_another(pair):
    pair.begin("under way")
    link_of = pair.decode.ranks[0].node._fetching._links
    wait_for(lambda: link_of)
    links = dict(link_of)
    pair.decode.announce("stale", replace(pair.prefill.where, engine_id="an earlier life"), computed=True)
    (ended,) = pair.decode.fetched()
    assert (ended.name, ended.ending) == ("stale", Ending.FAILED)
    assert link_of == links and all(link.alive for link in links.values())
    pair.end("under way")


def test_what_an_instance_began_fails_when_another_life_answers_at_its_address(make_pair):
    """Not when the lease ends: here it would be longer than anybody waits."""
    pair = make_pair(NodeOptions(page_tokens=16, timing=Timing(lease_s=600.0, deadline_s=600.0)))
    pair.begin("under way")
    wait_for(lambda: pair.decode.ranks[0].node._fetching._links)
    pair.prefill.directory.close()  # its ranks still take connections, and say nothing
    later = Instances(1, P_TABLE, engine_id="later", port=pair.prefill.where.port)
    try:
        pair.decode.announce("of the later life", later.where, computed=False)
        (ended,) = pair.decode.fetched()
        assert (ended.name, ended.ending, ended.cause) == ("under way", Ending.FAILED, "the producer is gone")
    finally:
        later.close()


def test_a_prefill_instance_that_closes_every_connection_is_not_stormed(make_pair, monkeypatch):
    pair, visits = make_pair(NodeOptions(page_tokens=16, timing=Timing(deadline_s=4.0, hold_s=4.0))), []

    def refuse(*_: object) -> None:
        visits.append(None)
        raise TransferError("not today")

    monkeypatch.setattr(transfer.serving.Serving, "_meet", refuse)
    pair.decode.announce("t", pair.prefill.where, computed=False)
    (ended,) = pair.decode.fetched()
    assert ended.ending is Ending.EXPIRED
    assert 1 <= len(visits) <= 9


# Connections that break


def test_a_data_connection_that_broke_is_made_again_for_the_next_transfer(pair):
    pair.serves()
    for visitor in pair.prefill.ranks[0].node._serving._visitors.values():
        visitor.data.result().close()
    pair.serves()


def test_a_control_connection_that_breaks_in_mid_transfer_costs_no_transfer(make_pair, monkeypatch):
    pair, may_connect = make_pair(), threading.Event()
    monkeypatch.setattr(transfer.fetching, "_RECONNECT_S", 0.01)

    async def late(*arguments, **options):
        if not may_connect.is_set():
            raise Unavailable("not yet")
        return await connect(*arguments, **options)

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


# What the log says of it


def test_closing_with_connections_open_says_nothing(caplog):
    pair = Pair()
    pair.serves()
    pair.close()
    assert caplog.records == []


# Closing


def test_a_data_connection_that_failed_and_was_not_needed_says_nothing(caplog):
    """asyncio would, when its future is collected in the middle of something else."""
    pair = Pair()
    layout, serving = pair.decode.ranks[0].layout, pair.prefill.ranks[0].node._serving
    with dial(pair.ports[RANK_PURPOSE]) as connection:
        greet(connection, RANK_PURPOSE, Identity())
        connection.sendall(framed(encode(introduction(layout, endpoints={}))))
        wait_for(lambda: any(visitor.data.done() for visitor in list(serving._visitors.values())))
        pair.close()
    serving._visitors.clear()
    gc.collect()
    assert caplog.records == []


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

    task = thread.run(begin(), 60)
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
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()
        listener.close()

    loop.run(run(), 60)
    assert said == []


@pytest.mark.parametrize("error", [TransferError("still being written"), RuntimeError("can't start new thread")])
def test_blocks_that_may_still_be_written_to_are_the_engine_s_once_they_are_not(pair, monkeypatch, caplog, error):
    begin_revoke, failures = Memory.begin_revoke, [error, error]

    def fails_at_first(memory, grant):
        if failures:
            raise failures.pop()
        return begin_revoke(memory, grant)

    monkeypatch.setattr(transfer.fetching, "_REVOKE_AGAIN_S", 0.01)
    monkeypatch.setattr(Memory, "begin_revoke", fails_at_first)
    pair.serves()
    assert not failures and "a transfer keeps its blocks for now" in caplog.text
