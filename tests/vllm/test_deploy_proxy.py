"""The built-in router between stand-ins for engines: what each is sent, who is asked instead, and who is left alone.

It is here because httpx and uvicorn come with an engine; no engine is started.
"""

from __future__ import annotations

import http.client
import http.server
import json
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

LIMIT_S = 60.0
QUICK = "import mooncake_connector.deploy.proxy as p; p.HEALTH_EVERY_S = 0.2; p.main()"
FEW_FILES = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (40, r.getrlimit(r.RLIMIT_NOFILE)[1])); "
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2], "anything": {"else": None}}
BODY = {"model": "m", "prompt": "a b", "max_tokens": 7, "min_tokens": 2, "stream_options": {"x": 1}}


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


def free_port() -> int:
    """Below those that Linux hands out to whoever asks for any."""
    while True:
        port = random.SystemRandom().randrange(10000, 32768)
        with suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port


@dataclass
class Engine:
    """A server that answers as told, and notes what it was sent and who has left."""

    name: str
    status: int = 200
    waits: threading.Event = field(default_factory=threading.Event)
    """Before the answer, or after the first piece of a stream; set by default."""
    healthy: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    left: int = 0
    looks: int = 0
    """How often it was asked for its health."""

    def __post_init__(self) -> None:
        self.waits.set()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/health":
                    engine.looks += 1
                    self.answer(200 if engine.healthy else 500, {})
                else:
                    self.answer(200, {"data": [{"id": engine.name}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    engine.aborted.append(body["rid"])
                    self.answer(200, {})
                    return
                engine.bodies.append(body)
                engine.headers.append(dict(self.headers.items()))
                if body.get("stream"):
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    self.piece(f"data: {engine.name}\n\n")
                    if self.stays():
                        self.piece("data: [DONE]\n\n")
                        self.wfile.write(b"0\r\n\r\n")
                elif self.stays():
                    self.answer(engine.status, {"by": engine.name, "kv_transfer_params": PARAMS})

            def stays(self) -> bool:
                """Wait as told; whether the client is still there."""
                while not engine.waits.wait(0.01):
                    if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                        engine.left += 1
                        self.close_connection = True
                        return False
                return True

            def piece(self, text: str) -> None:
                self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

            def answer(self, status: int, content: object) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """Connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()


class Proxied:
    """The proxy with two instances of each role; peer ports are 1 and 2."""

    def __init__(self, *arguments: str, few_files: bool = False) -> None:
        self.prefills, self.decodes = ([Engine(f"{role}{n}") for n in (0, 1)] for role in "pd")
        self.port = free_port()
        command = [sys.executable, "-c", (FEW_FILES if few_files else "") + QUICK, "--port", str(self.port), *arguments]
        for number, one in enumerate(self.prefills, 1):
            command += ["--prefill", f"{one.url},{number}" + (",192.0.2.7" if CONCURRENT[-1] in arguments else "")]
        for one in self.decodes:
            command += ["--decode", one.url]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(self.is_well, "the proxy")
        # Who is asked a second time is known to be healthy.
        wait_until(lambda: all(one.looks > 1 for one in (*self.prefills, *self.decodes)), "a look at all instances")

    def is_well(self) -> bool:
        with suppress(OSError):
            return self.get("/health")[0] == 200
        return False

    def get(self, path: str) -> tuple[int, bytes]:
        return self._read(self.open("GET", path))

    def ask(self, body: dict[str, Any] | bytes = BODY, path: str = "/v1/completions", **headers: str) -> Any:
        """(status, answer)"""
        status, data = self._read(self.open("POST", path, body, **headers))
        return status, json.loads(data)

    def ask_at_both(self) -> None:
        """A request that decode answers when both have got it, not before: nobody waits for prefill then."""
        connection = self.open("POST", "/v1/completions", BODY)
        wait_until(lambda: bool(self.sent(self.prefills) and self.sent(self.decodes)), "the request at both")
        for one in self.decodes:
            one.waits.set()
        assert connection.getresponse().status == 200
        connection.close()

    def open(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        return connection

    def sent(self, engines: list[Engine]) -> list[dict[str, Any]]:
        return [body for one in engines for body in one.bodies]

    def _read(self, connection: http.client.HTTPConnection) -> tuple[int, bytes]:
        try:
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture
def proxied() -> Iterator[Callable[..., Proxied]]:
    made: list[Proxied] = []

    def make(*arguments: str, few_files: bool = False) -> Proxied:
        made.append(Proxied(*arguments, few_files=few_files))
        return made[-1]

    yield make
    for one in made:
        one.process.terminate()
        assert one.process.wait(LIMIT_S) in (0, -15)


VLLM, CONCURRENT, SGLANG = ("--engine", "vllm"), ("--engine", "vllm", "--order", "concurrent"), ("--engine", "sglang")
every_way = pytest.mark.parametrize("way", [VLLM, CONCURRENT, SGLANG], ids=("sequential", "concurrent", "sglang"))


def test_one_after_the_other_decode_gets_what_prefill_answered(proxied):
    proxy = proxied(*VLLM)
    status, answer = proxy.ask({**BODY, "stream": False}, Authorization="Bearer x")
    assert status == 200 and answer["by"].startswith("d")
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    assert prefill == {
        "model": "m", "prompt": "a b", "max_tokens": 1, "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }  # fmt: skip
    assert decode == {**BODY, "stream": False, "kv_transfer_params": PARAMS}
    for one in (*proxy.prefills, *proxy.decodes):
        for headers in one.headers:
            assert headers["authorization"] == "Bearer x" and headers["x-request-id"]


def test_both_at_once_know_each_other_by_name_and_port(proxied):
    proxy = proxied(*CONCURRENT)
    for one in (*proxy.prefills, *proxy.decodes):
        one.waits.clear()
    proxy.ask_at_both()  # prefill has not answered
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    name = prefill["kv_transfer_params"]["transfer_id"]
    assert prefill["max_tokens"] == 1 and decode["max_tokens"] == 7
    port = 1 if proxy.prefills[0].bodies else 2
    assert decode["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name,
        "remote_host": "192.0.2.7", "remote_port": port,
    }  # fmt: skip
    wait_until(lambda: sum(one.left for one in proxy.prefills) == 1, "prefill to be left, whom nobody wants")


def test_sglang_meets_in_one_room(proxied):
    proxy = proxied(*SGLANG)
    for one in proxy.decodes:
        one.waits.clear()
    proxy.ask_at_both()
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    assert prefill == decode and BODY.items() <= decode.items()
    assert decode["bootstrap_host"] == "127.0.0.1" and 0 <= decode["bootstrap_room"] < 1 << 63
    assert decode["bootstrap_port"] == (1 if proxy.prefills[0].bodies else 2)


def test_sglang_meets_in_another_room_where_decode_is_replaced(proxied):
    proxy = proxied(*SGLANG)
    proxy.decodes[0].status = 503
    assert [proxy.ask()[1]["by"] for _ in range(2)] == ["d1", "d1"]
    rooms = [body["bootstrap_room"] for body in proxy.sent(proxy.decodes)]
    assert len(set(rooms)) == len(rooms) == 3  # KV that was handed over is not handed over again


def test_sglang_has_a_room_for_each_of_several_prompts(proxied):
    proxy = proxied(*SGLANG)
    assert proxy.ask({**BODY, "prompt": ["a", "b"]})[0] == 200
    (decode,) = proxy.sent(proxy.decodes)
    assert len(set(decode["bootstrap_room"])) == 2 and decode["bootstrap_host"] == ["127.0.0.1"] * 2


@every_way
def test_a_stream_is_passed_on_as_it_comes(proxied, way):
    proxy = proxied(*way)
    for one in proxy.decodes:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/chat/completions", {**BODY, "stream": True})
    response = connection.getresponse()
    assert response.getheader("Content-Type") == "text/event-stream"
    assert response.readline().startswith(b"data: d")  # before the engine goes on
    for one in proxy.decodes:
        one.waits.set()
    assert response.read() == b"\ndata: [DONE]\n\n"
    connection.close()


@every_way
def test_a_client_that_leaves_takes_its_request_from_both(proxied, way):
    proxy = proxied(*way)
    engines = [*proxy.prefills, *proxy.decodes]
    waiting = proxy.decodes if way is VLLM else engines
    for one in waiting:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    asked = 1 if way is VLLM else 2
    wait_until(lambda: len(proxy.sent(waiting)) == asked, "the request at the engines")
    connection.close()
    wait_until(lambda: sum(one.left for one in waiting) == asked, "the engines to be left")
    if way is SGLANG:
        (rid,) = {body["rid"] for body in proxy.sent(proxy.decodes)}
        wait_until(lambda: sum(rid in one.aborted for one in proxy.decodes) == 1, "an abort at decode")
        assert sum(rid in one.aborted for one in proxy.prefills) == 1


def test_a_client_that_leaves_during_prefill_is_not_decoded_for(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    wait_until(lambda: len(proxy.sent(proxy.prefills)) == 1, "the request at prefill")
    connection.close()
    wait_until(lambda: sum(one.left for one in proxy.prefills) == 1, "prefill to be left")
    assert proxy.ask.__self__ is proxy and proxy.sent(proxy.decodes) == []


@every_way
def test_who_has_died_is_replaced(proxied, way):
    proxy = proxied(*way)
    proxy.prefills[0].die()
    proxy.decodes[1].die()
    answers = [proxy.ask() for _ in range(6)]
    assert [(status, answer["by"]) for status, answer in answers] == [(200, "d0")] * 6
    if way is VLLM:  # in the others nobody waits for a prefill whose decode has answered
        assert len(proxy.prefills[1].bodies) == 6


@pytest.mark.parametrize("way", [VLLM, CONCURRENT], ids=("sequential", "concurrent"))
def test_without_prefill_vllm_decodes_plainly(proxied, way):
    proxy = proxied(*way)
    for one in proxy.prefills:
        one.die()
    wait_until(
        lambda: proxy.ask()[0] == 200 and "kv_transfer_params" not in proxy.sent(proxy.decodes)[-1], "a plain one"
    )
    assert proxy.is_well()


def test_without_prefill_sglang_cannot_answer(proxied):
    proxy = proxied(*SGLANG)
    for one in proxy.decodes:
        one.waits.clear()  # as they do without a prefill
    for one in proxy.prefills:
        one.die()
    status, answer = proxy.ask()
    assert status == 503 and "no prefill instance answers" in answer["error"]["message"]
    wait_until(lambda: proxy.get("/health")[0] == 503, "the proxy to say so")


@every_way
def test_without_decode_nothing_is_answered(proxied, way):
    proxy = proxied(*way)
    for one in proxy.decodes:
        one.die()
    status, answer = proxy.ask()
    assert status == 503 and "no decode instance answers" in answer["error"]["message"]
    wait_until(lambda: proxy.get("/health")[0] == 503, "the proxy to say so")


def test_a_prefill_that_stops_to_be_healthy_is_not_waited_for(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.waits.clear()
    connection = proxy.open("POST", "/v1/completions", BODY)
    wait_until(lambda: len(proxy.sent(proxy.prefills)) == 1, "the request at prefill")
    for one in proxy.prefills:
        one.healthy = False
    assert connection.getresponse().status == 200
    connection.close()
    assert "kv_transfer_params" not in proxy.sent(proxy.decodes)[0]


def test_what_prefill_refuses_the_client_is_told(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.status = 400
    assert proxy.ask()[0] == 400 and proxy.sent(proxy.decodes) == []


def test_what_prefill_fails_at_decode_does(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.prefills:
        one.status = 500
    assert proxy.ask()[0] == 200 and len(proxy.sent(proxy.prefills)) == 2
    assert proxy.sent(proxy.decodes) == [BODY]


def test_an_error_of_decode_is_passed_on(proxied):
    proxy = proxied(*VLLM)
    for one in proxy.decodes:
        one.status = 500
    assert proxy.ask()[0] == 500 and len(proxy.sent(proxy.decodes)) == 1


def test_requests_go_round(proxied):
    proxy = proxied(*VLLM)
    for _ in range(6):
        assert proxy.ask()[0] == 200
    assert [len(one.bodies) for one in (*proxy.prefills, *proxy.decodes)] == [3, 3, 3, 3]


def test_the_least_loaded_is_chosen(proxied):
    proxy = proxied(*VLLM, "--policy", "least-loaded")
    proxy.decodes[0].waits.clear()
    held = []
    while not proxy.decodes[0].bodies:
        held.append(proxy.open("POST", "/v1/completions", BODY))
        number = len(held)
        wait_until(lambda number=number: len(proxy.sent(proxy.decodes)) == number, "the request at decode")
    others = len(proxy.decodes[1].bodies)
    for _ in range(4):
        assert proxy.ask()[1]["by"] == "d1"
    assert len(proxy.decodes[0].bodies) == 1 and len(proxy.decodes[1].bodies) == others + 4
    proxy.decodes[0].waits.set()
    for connection in held:
        assert connection.getresponse().status == 200
        connection.close()


def test_models_are_those_of_decode_and_the_rest_is_refused(proxied):
    proxy = proxied(*VLLM)
    status, data = proxy.get("/v1/models")
    assert status == 200 and json.loads(data)["data"][0]["id"] in ("d0", "d1")
    assert proxy.get("/v1/nothing")[0] == 404
    assert proxy.ask(b"{")[0] == 400 and proxy.ask(b"[]")[0] == 400
    assert proxy.sent(proxy.prefills) == []


def test_what_a_client_may_write_arrives(proxied):
    """In JSON and in headers; but not whom to ask for KV."""
    proxy = proxied(*VLLM)
    body = b'{"prompt": "\\ud800", "x": NaN, "kv_transfer_params": {"remote_host": "x"}}'
    assert proxy.ask(body, Authorization="\xe9")[0] == 200
    (prefill,), (decode,) = proxy.sent(proxy.prefills), proxy.sent(proxy.decodes)
    assert prefill["prompt"] == decode["prompt"] == "\ud800" and decode["x"] != decode["x"]
    assert decode["kv_transfer_params"] == PARAMS and "remote_host" not in prefill["kv_transfer_params"]
    (headers,) = (one.headers[0] for one in proxy.decodes if one.headers)
    assert headers["authorization"] == "\xe9" and headers["accept-encoding"] == "identity"



def test_more_requests_than_files_are_usually_allowed(proxied):
    proxy = proxied(*VLLM, few_files=True)
    for one in proxy.decodes:
        one.waits.clear()
    held = [proxy.open("POST", "/v1/completions", BODY) for _ in range(30)]
    wait_until(lambda: len(proxy.sent(proxy.decodes)) == 30, "all requests at decode")
    for one in proxy.decodes:
        one.waits.set()
    assert {connection.getresponse().status for connection in held} == {200}
    for connection in held:
        connection.close()
