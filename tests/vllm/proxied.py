"""Stand-ins for engines, and the built-in router between them."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from e2e.forked import ForkServer

LIMIT_S = 60.0
ROUTERS = ForkServer(Path(sys.executable), "router", ["router"])
"""Which has imported what they need: most of what a start takes."""
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [1, 2], "anything": {"else": None}}
VLLM, CONCURRENT, SGLANG = ("--engine", "vllm"), ("--engine", "vllm", "--order", "concurrent"), ("--engine", "sglang")
every_way = pytest.mark.parametrize("way", [VLLM, CONCURRENT, SGLANG], ids=("sequential", "concurrent", "sglang"))
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


class Server(http.server.ThreadingHTTPServer):
    """One that a test may ask many things at once."""

    daemon_threads = True
    request_queue_size = 512
    """Or 5 connections may wait, and those beyond are broken on a busy machine."""


@dataclass
class Engine:
    """A server that answers as told, and notes what it was sent and who has left."""

    name: str
    status: int = 200
    waits: threading.Event = field(default_factory=threading.Event)
    """Before the answer, or after the first piece of a stream; set by default."""
    healthy: bool = True
    ill_looks: int = 0
    """So many times more its health is bad."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0
    abort_keys: list[str | None] = field(default_factory=list)
    """What authorized them."""
    queues: bool = False
    """A stream is headers, which come at once, and one piece, which comes when it need not wait any more."""
    breaks: bool = False
    """A stream ends after its first piece, or before it where that has to wait, and with it the connection."""
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
                    engine.ill_looks -= (is_ill := engine.ill_looks > 0)
                    self.answer(200 if engine.healthy and not is_ill else 500, {})
                else:
                    self.answer(200, {"data": [{"id": engine.name}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/abort_request":
                    engine.abort_keys.append(self.headers["Authorization"])
                    engine.aborted.append(body["rid"])
                    self.answer(200, {})
                    return
                if self.path == "/tokenize":
                    engine.tokenized.append(body)
                    self.answer(engine.status, {"tokens": [*str(body.get("prompt") or body["messages"]).encode()]})
                    return
                engine.bodies.append(body)
                engine.headers.append(dict(self.headers.items()))
                if body.get("stream"):
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    if engine.queues:
                        self.close_connection = True
                        if self.stays() and not engine.breaks:
                            self.piece(f"data: {engine.name}\n\n", b"0\r\n\r\n")
                        return
                    self.piece(f"data: {engine.name}\n\n")
                    if engine.breaks:
                        self.close_connection = True
                    elif self.stays():
                        self.piece("data: [DONE]\n\n", b"0\r\n\r\n")
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

            def piece(self, text: str, end: bytes = b"") -> None:
                self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode() + end)

            def answer(self, status: int, content: object) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """Connections are refused from now on."""
        self._server.shutdown()
        self._server.server_close()


class Proxied:
    """The proxy with two instances of each role; peer ports are 1 and 2; `before` runs in it first.

    `plain` ones compute prompts as well: there are no prefill instances.
    """

    def __init__(self, *arguments: str, before: str = "", plain: bool = False) -> None:
        self.prefills = [] if plain else [Engine(f"p{n}") for n in (0, 1)]
        self.decodes = [Engine(f"d{n}") for n in (0, 1)]
        self.port = free_port()
        command = [before, "--port", str(self.port), *arguments]
        for number, one in enumerate(self.prefills, 1):
            command += ["--prefill", f"{one.url},{number}" + (",192.0.2.7" if CONCURRENT[-1] in arguments else "")]
        for one in self.decodes:
            command += ["--decode", one.url]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        with os.fdopen(os.dup(2), "wb") as errors:
            self.process = ROUTERS.start(command, {**os.environ, "PYTHONPATH": path}, errors)
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
