"""Clients of the agent's HTTP server, and publishers of events, that do not mean well: they cost others nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agent.asking import PATIENT_S, Client
from agent.publisher import Publisher, packed, removed, stored
from agent.stand_in import until
from agent.test_index import REGISTERED, served, serving
from agent.test_index_events import BLOCKS, HASHES, TOKENS, Told, follow, gpu, metric

from store_client.agent.http import app, protocol
from store_client.agent.index import feeds, stream

__all__ = ["served"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, pool: Path) -> Iterator[Client]:
    """An agent that lets a client take a second over everything."""
    monkeypatch.setattr(protocol, "HEAD_S", 1.0)
    monkeypatch.setattr(protocol, "REQUEST_S", 1.0)
    with serving(pool) as client:
        yield client


def connected(client: Client, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", client.port), PATIENT_S)
    connection.sendall(sent)
    return connection


def all_of(connection: socket.socket) -> bytes:
    """What it still says, until it is closed."""
    found = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            found += piece
    return found


HALF = b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HALF + b"\r\n{"], ids=["nothing", "half a head", "half a body"])
def test_a_client_that_does_not_go_on_is_left(impatient, sent):
    assert not all_of(connected(impatient, sent))
    assert impatient.ask("GET", "/health").status == 200


def test_those_that_send_slowly_keep_nobody_from_an_answer(served):
    with ExitStack() as stack:
        for _ in range(3 * app._LARGE_AT_ONCE):
            stack.enter_context(connected(served, HALF + b"\r\n{"))
        assert served.ask("GET", "/health").status == 200
        assert served.query(TOKENS) == {"default": {}}


def test_of_large_bodies_so_many_are_taken_in_at_a_time_and_the_next_ones_wait_their_turn(served, monkeypatch):
    monkeypatch.setattr(app, "BODY_S", 2.0)
    large = b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n" + b" " * (
        app._LARGE_NBYTES + 1
    )
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(served, large)) for _ in range(app._LARGE_AT_ONCE + 2)]
        assert served.query(TOKENS) == {"default": {}}
        assert {all_of(one)[:12] for one in slow} <= {b"", b"HTTP/1.1 408"}
    spaces = b" " * (app._LARGE_NBYTES + 5)
    until(lambda: served.ask("POST", "/query", spaces).status == 400, "their places are not free again")


@pytest.mark.parametrize("nbytes", [1, 7, 4_000, 100_000])
def test_a_body_is_the_same_in_whichever_pieces_it_comes(served, nbytes):
    """And what comes with its end is the next request."""
    asked = {"model": "m", "block_size": 64, "token_ids": "x" if nbytes < 4_000 else [7] * 150_000}
    body = json.dumps(asked).encode()
    head = b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n"
    sent = (head % (len(body), b"") + body) * 2 + head % (len(body), b"Connection: close\r\n") + body
    connection = connected(served)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for at in range(0, len(sent), nbytes):
        connection.sendall(sent[at : at + nbytes])
    said = all_of(connection)
    status = b"HTTP/1.1 400" if nbytes < 4_000 else b"HTTP/1.1 200"
    assert said.count(status) == said.count(b"HTTP/1.1") == 3, said


@pytest.mark.parametrize("first", [1, 50_000, 300_000])
def test_a_body_that_begins_with_its_head_is_waited_for_no_longer_than_it_is(served, first):
    body = json.dumps({"model": "m", "block_size": 64, "token_ids": [7] * 150_000}).encode()
    head = b"POST /query HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = connected(served, head + body[:first])
    connection.sendall(body[first:])
    assert all_of(connection).startswith(b"HTTP/1.1 200")


def test_who_leaves_in_the_middle_of_a_body_costs_nobody_an_answer(served):
    for sent in (b"{", b" " * 100_000, b" " * 300_000):
        connected(served, b"POST /query HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500000\r\n\r\n" + sent).close()
    assert served.query(TOKENS) == {"default": {}}


def test_what_follows_a_body_that_was_refused_is_no_request(served):
    smuggled = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    said = all_of(connected(served, head))  # the body has not come, and nobody waits for it
    assert said.startswith(b"HTTP/1.1 404") and b"connection: close" in said.lower()
    assert all_of(connected(served, head + smuggled)).count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Content-Length: -1\r\n",
        b"Content Length: 5\r\n",
        b"X: " + b"x" * (1 << 20) + b"\r\n",
    ],
)
def test_a_request_that_could_be_read_in_two_ways_or_is_endless_is_none(served, head):
    said = all_of(connected(served, b"POST /query HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n{}{}{}"))
    assert said[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 501") and said.count(b"HTTP/1.1") <= 1
    assert served.ask("GET", "/health").status == 200


def test_a_name_that_somebody_points_to_the_loopback_is_not_answered_without_a_token(served, pool, tmp_path):
    for host, status in (
        ("evil.example", 403), ("localhost.evil.example:1", 403), ("localhost:1", 200), ("[::1]:7787", 200),
        ("127.0.0.1", 200), ("", 200),
    ):  # fmt: skip
        assert served.ask("GET", "/services", None, {"Host": host}).status == status, host
    file = tmp_path / "token"
    file.write_text("a token of the test")
    file.chmod(0o600)
    with serving(tmp_path / "other", agent_http_token_file=str(file)) as client:
        client.token = "a token of the test"
        assert client.ask("GET", "/services", None, {"Host": "agent.example"}).status == 200


def test_a_registration_is_small(served):
    answer = served.ask("POST", "/register", {**REGISTERED, "hash_profile": "x" * (1 << 17)})
    assert answer.status == 413


def test_an_upgrade_is_not_taken_up(served):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n"
    said = all_of(connected(served, head + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n\r\n"))
    assert not said.startswith((b"HTTP/1.1 101", b"HTTP/1.1 5"))


# -- events -------------------------------------------------------------------------------------------------------


def test_one_hash_for_two_blocks_of_an_event_leaves_nothing_behind():
    told = Told()
    told(stored([HASHES[0], HASHES[0]], BLOCKS[0] + BLOCKS[1]))
    told(removed([HASHES[0]]))
    assert (told.held.num_blocks, told.stream.num_blocks) == (0, 0)
    told(stored([HASHES[0], HASHES[0]], BLOCKS[0] + BLOCKS[1]))
    told.stream.close()
    assert told.held.num_blocks == 0


def test_numbers_that_no_hash_has_are_junk_and_leave_nothing_behind():
    told = Told(type="Mooncake")
    for wrong in ([-5], [1 << 62, -1], ["x"], [None]):
        told({"event_type": "stored", "seq_hashes": wrong, "medium": "cpu"})
    told(stored([HASHES[0]], BLOCKS[0], group_idx=-1), stored([HASHES[0]], BLOCKS[0], group_idx=1 << 40))
    assert told.counts["junk"] == 6 and told.held.num_blocks == 0
    told.stream.close()


def test_a_publisher_of_ever_new_block_sizes_is_hashed_for_a_few_of_them_alone():
    told = Told(type="Mooncake")
    for size in range(-3, 40):
        told({"event_type": "stored", "seq_hashes": [size + 100], "medium": "cpu", "block_size": size})
    assert len(told.instance.owners) == stream._MAX_SIZES
    assert all(size > 0 for _, size in told.instance.owners)


def test_what_a_publisher_may_fill_is_bounded_over_all_of_its_groups(monkeypatch):
    monkeypatch.setattr(stream, "MAX_BLOCKS", 100)
    told = Told()
    for number in range(400):
        told(stored([b"%d" % number], [number] * 16, group_idx=number % 200, kv_cache_spec_kind="full_attention"))
    assert told.stream.num_blocks == 100 and told.counts["unplaced_blocks"] == 300
    assert len(told.stream._places) <= 100


def test_salts_without_end_are_forgotten_and_those_that_come_next_are_known(monkeypatch):
    monkeypatch.setattr(stream, "MAX_CONTEXTS", 10)
    told = Told()
    for number in range(35):
        told(stored([b"%d" % number], BLOCKS[0], extra_keys=[[f"salt {number}"]]))
        assert told.leading(salt=f"salt {number}") == 1
    assert told.held.num_blocks == told.stream.num_blocks == 5 and told.counts["forgotten_contexts"] == 30
    assert told.leading(salt="salt 3") == 0
    told(stored([b"long"], BLOCKS[0], extra_keys=[["s" * 5000]]))
    assert told.counts["unplaced_blocks"] == 1


def test_two_engines_of_one_model_are_told_apart_and_a_name_is_taken_once(served):
    with Publisher() as first, Publisher() as second:
        follow(served, first)
        assert served.ask("POST", "/register", {**REGISTERED, "block_size": 16, **second.endpoints}).status == 409
        served.register("b", block_size=16, **second.endpoints)
        second.publish(stored(HASHES[:2], TOKENS[:32]))
        first.publish(stored(HASHES[:3], TOKENS[:48]))

        def told() -> dict[str, int]:
            found = served.query(TOKENS, block_size=16)["default"]
            return {name: of["GPU"] for name, of in found.items()}

        until(lambda: told() == {"a": 48, "b": 32}, "the engines are not told apart")
        served.post("/unregister", instance_id="a", dp_rank=0)
        assert told() == {"b": 32}
        served.register("a", block_size=16, **second.endpoints)
        until(lambda: told() == {"a": 32, "b": 32}, "the name cannot be used again")


class Answering(Publisher):
    """Replays what the test says, with no end of its own."""

    def __init__(self, *numbered: tuple[int, bytes], forever: bool = False) -> None:
        self._numbered, self._forever = numbered, forever
        super().__init__()

    def _replay(self) -> None:
        client = None
        while not self._closed:
            if self._router.poll(5):
                client = self._router.recv_multipart()[0]
            for number, payload in self._numbered if client else ():
                self._router.send_multipart([client, b"", b"", number.to_bytes(8, "big"), payload])
            if not self._forever:
                client = None


@pytest.mark.parametrize("numbered", [[(0, packed())], [(1 << 63, packed())], [(3, b"junk")], [(1 << 62, packed())]])
def test_a_replay_without_end_or_sense_is_given_up_and_what_is_published_counts(served, monkeypatch, numbered):
    monkeypatch.setattr(feeds, "REPLAYS_S", 1.0)
    monkeypatch.setattr(feeds, "REPLAY_S", 1.0)
    with Answering(*numbered, forever=numbered[0][0] == 0) as publisher:
        follow(served, publisher)
        publisher.publish(stored(HASHES[:3], TOKENS[:48]))
        until(lambda: gpu(served) == 48, "the blocks are not known")
        assert metric(served, "failed_replays") + metric(served, "junk") > 0


def test_what_is_no_batch_costs_the_numbers_around_it_alone(served):
    with Publisher() as publisher:
        follow(served, publisher, replay=False)
        for frames in (
            [b""],
            [b"", b"1", packed()],
            [b"", b"\xff" * 8, packed()],
            [b"", b"\0" * 8, b"junk"],
            [b""] * 9,
        ):
            publisher._out.send_multipart(frames)
        publisher._out.send_multipart([b"", b"\x7f" + b"\xff" * 7, packed()])  # the last number that there is
        until(lambda: metric(served, "junk") >= 5, "the junk is not counted")

        def known() -> bool:
            publisher.publish(stored(HASHES[:3], TOKENS[:48]))
            return gpu(served) == 48

        until(known, "the engine is not followed any more")


def test_a_message_beyond_all_measure_ends_the_connection_and_the_next_is_made(served, monkeypatch):
    monkeypatch.setattr(feeds, "MAX_BATCH_NBYTES", 100_000)
    with Publisher() as publisher:
        follow(served, publisher, replay=False)
        publisher._out.send_multipart([b"", (10**6).to_bytes(8, "big"), bytes(200_000)])
        until(lambda: metric(served, "disconnects") > 0, "it is taken in")

        def known() -> bool:
            publisher.publish(stored(HASHES[:3], TOKENS[:48]))
            return gpu(served) == 48

        until(known, "the engine is not followed any more")


def test_an_engine_that_is_silent_without_having_gone_is_not_believed(served, monkeypatch):
    """As a host that has lost its power: a relay that passes nothing on, and closes nothing."""
    monkeypatch.setattr(feeds, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(feeds, "SILENCE_MS", 2_000)
    with Publisher() as publisher, Relay(publisher.port) as relay:
        endpoint = {"endpoint": f"tcp://127.0.0.1:{relay.port}"}
        served.register("a", block_size=16, **endpoint)

        def known() -> bool:
            publisher.publish(stored(HASHES[:3], TOKENS[:48]))
            return gpu(served) == 48

        until(known, "the engine is not followed")
        relay.is_deaf = True
        until(lambda: gpu(served) == 0, "what a silent engine has is claimed")


class Relay:
    def __init__(self, port: int) -> None:
        self._to, self.is_deaf, self._closed = port, False, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(here)
            if self.is_deaf:
                continue
            there = socket.create_connection(("127.0.0.1", self._to))
            self._sockets.append(there)
            for pair in ((here, there), (there, here)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if not self.is_deaf:
                    target.sendall(piece)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.close()
        for one in self._sockets:
            one.close()


def test_a_publisher_that_never_pauses_keeps_nobody_waiting(served):
    """Its instance can be unregistered, and another one is followed."""
    flooding = threading.Event()
    with Publisher() as loud, Publisher() as quiet:
        follow(served, loud, replay=False)

        def flood() -> None:
            payload = packed(stored(HASHES[:3], TOKENS[:48]))
            while not flooding.is_set():
                loud._out.send_multipart([b"", (0).to_bytes(8, "big"), payload])

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            served.register("b", block_size=16, **quiet.endpoints)
            quiet.publish(stored(HASHES[:2], TOKENS[:32]))
            found = lambda: served.query(TOKENS, block_size=16)["default"]["b"]["GPU"]  # noqa: E731
            until(lambda: found() == 32, "another one is not followed")
            served.post("/unregister", instance_id="a", dp_rank=0)
            until(lambda: "index_blocks 2.0" in served.ask("GET", "/metrics").body.decode(), "its blocks are kept")
        finally:
            flooding.set()
            thread.join()


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "tcp://a name:1", "ipc://" + "x" * 200])
def test_an_endpoint_that_cannot_be_costs_itself(served, endpoint):
    if served.ask("POST", "/register", {**REGISTERED, "endpoint": endpoint}).status == 200:
        until(lambda: metric(served, "failed_subscriptions") > 0, "it is not counted")
    assert served.query(TOKENS, block_size=64)["default"].get("a", {"GPU": 0})["GPU"] == 0
    assert served.ask("POST", "/unregister", {"instance_id": "a"}).status in (200, 404)
