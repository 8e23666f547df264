"""A stand-in for an OpenAI-compatible server that streams: the client side of `bench serve` is tested against it."""

from __future__ import annotations

import http.server
import json
import threading
import time
from dataclasses import dataclass, field


def event(**fields) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def token(text: str, **fields) -> str:
    return event(choices=[{"text": text, **fields}])


@dataclass
class Behaviour:
    """What the stand-in answers; a test changes what it is about."""

    models: tuple[int, str, bytes] = (200, "application/json", b'{"data": [{"id": "m", "max_model_len": 4096}]}')
    status: int = 200
    kind: str = "text/event-stream"
    stream: list[str] = field(
        default_factory=lambda: [
            token("a", token_ids=[1]),
            token("b", token_ids=[2], finish_reason="length"),
            event(choices=[], usage={"prompt_tokens": 260}),
            "data: [DONE]\n\n",
        ]
    )
    answer: dict = field(default_factory=dict)
    """To a request that does not ask for a stream."""
    pause_s: float = 0.0
    refuses: str | None = None
    """A field of the request that is answered with 400."""
    key: str | None = None
    metrics: str | None = None
    healthy: bool = False
    asked: list[dict] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class StreamingServer:
    """Runs between `with` and its end, on a free port or the one that is given."""

    def __init__(self, port: int = 0) -> None:
        self.behaviour = Behaviour()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> StreamingServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.behaviour.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self):
        behaviour = self.behaviour
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/v1/models":
                    if behaviour.key and self.headers.get("Authorization") != f"Bearer {behaviour.key}":
                        return self._send(401, "application/json", b'{"error": "Unauthorized"}')
                    return self._send(*behaviour.models)
                if self.path == "/metrics" and behaviour.metrics is not None:
                    return self._send(200, "text/plain", behaviour.metrics.encode())
                return self._send(200 if self.path == "/health" and behaviour.healthy else 404, "text/plain", b"")

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    behaviour.asked.append(body)
                    behaviour.at_once += 1
                    behaviour.most_at_once = max(behaviour.most_at_once, behaviour.at_once)
                try:
                    self._answer(body)
                except OSError:
                    pass  # the client has gone
                finally:
                    with lock:
                        behaviour.at_once -= 1

            def _answer(self, body):
                if behaviour.refuses in body:
                    message = {"message": f"{behaviour.refuses} is not known"}
                    return self._send(400, "application/json", json.dumps({"error": message}).encode())
                if behaviour.status != 200:
                    return self._send(behaviour.status, "text/html", b"<h1>Out of order</h1>")
                if not body.get("stream"):
                    return self._send(200, "application/json", json.dumps(behaviour.answer).encode())
                self.send_response(200)
                self.send_header("Content-Type", behaviour.kind)
                self.end_headers()
                for piece in behaviour.stream:
                    if behaviour.pause_s:
                        behaviour.ended.wait(behaviour.pause_s)
                    self.wfile.write(piece.encode())
                    self.wfile.flush()
                return None

            def _send(self, status, kind, content):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        return Handler


def wait_until(condition, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)
