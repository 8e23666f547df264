"""An OpenAI-compatible server as a client sees it: pages and streamed completions, each with one deadline."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.answer import Answer, AnswerReader, RequestFailed, error_text
from mooncake_connector.cli.bench.serve.workload import Prompt

_SHORT_S = 15.0
_LARGEST = 32 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """A server by its address; `path` is what comes before `/v1`."""

    host: str
    port: int
    secure: bool = False
    path: str = ""
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.path}"

    def get(self, path: str, limit_s: float = _SHORT_S) -> tuple[int, str, bytes]:
        """Status, content type and content. Raises RequestFailed where there is no answer."""
        return self.call("GET", path, None, limit_s, page)

    def is_healthy(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except RequestFailed:
            return False

    def stream(self, body: dict[str, Any], limit_s: float) -> Answer:
        """A completion. Raises RequestFailed for whatever is not a whole answer in time."""
        reader = AnswerReader(time.monotonic())

        def read(reply: http.client.HTTPResponse) -> Answer:
            if reply.status != 200:
                raise RequestFailed(f"answered {reply.status}: {error_text(page(reply)[2])}", reply.status)
            kind = reply.headers.get_content_type()
            if kind != "text/event-stream":
                raise RequestFailed(f"answered with {kind} instead of a stream of events (text/event-stream)")
            while piece := reply.read1(1 << 16):
                reader.take(piece)
            return reader.answer()

        return self.call("POST", "/v1/completions", {**body, "stream": True}, limit_s, read)

    def call(
        self, method: str, path: str, body: Any, limit_s: float, read: Callable[[http.client.HTTPResponse], T]
    ) -> T:
        """What `read` makes of the reply. Raises RequestFailed for whatever goes wrong until then.

        Another thread does it, and is left alone at the deadline: looking up a name knows none, and the time-out of a
        socket begins anew with each address of the name and with each byte that arrives.
        """
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        content = None if body is None else json.dumps(body)
        until_s = time.monotonic() + limit_s
        connected: list[socket.socket] = []
        ended: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

        def exchange() -> None:
            try:
                kind = http.client.HTTPSConnection if self.secure else http.client.HTTPConnection
                with contextlib.closing(kind(self.host, self.port, timeout=limit_s)) as connection:
                    connection.connect()
                    connected.append(connection.sock)
                    if time.monotonic() >= until_s:  # nobody waits for the answer any more
                        return
                    connection.request(method, self.path + path, content, headers)
                    with connection.getresponse() as reply:
                        ended.put(read(reply))
            except Exception as error:  # a strange server has many ways to trip up whoever reads its answer
                ended.put(error)

        threading.Thread(target=exchange, daemon=True).start()
        try:
            found = ended.get(timeout=limit_s)
        except queue.Empty:
            found = TimeoutError()
            for sock in connected:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if isinstance(found, RequestFailed):
            raise found
        if isinstance(found, Exception):
            late = isinstance(found, TimeoutError)
            raise RequestFailed("did not answer in time" if late else f"{type(found).__name__}: {found}") from found
        return found


def page(reply: http.client.HTTPResponse) -> tuple[int, str, bytes]:
    """Status, content type and content, for `Server.call`."""
    content = reply.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise RequestFailed(f"sent more than {_LARGEST >> 20} MiB")
    return reply.status, reply.headers.get_content_type(), content


def parse_url(url: str, api_key: str | None) -> Server:
    """A server by its URL, with or without `/v1` or `/v1/completions`. Raises BenchError."""
    refusal = f"{url.rpartition('@')[2]!r} is no address of a server: write it like http://127.0.0.1:8000"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise BenchError(refusal) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or _has_blank(parts.hostname + parts.path):
        raise BenchError(refusal)
    if parts.username or parts.password:
        raise BenchError(f"the address of {parts.hostname} has a password in it: give a key by OPENAI_API_KEY instead")
    path = parts.path.rstrip("/").removesuffix("/completions").rstrip("/").removesuffix("/v1")
    secure = parts.scheme == "https"
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError("the API key has characters that no HTTP header can carry")
    return Server(parts.hostname, port or (443 if secure else 80), secure, path, api_key)


def _has_blank(text: str) -> bool:
    return any(character.isspace() or not character.isprintable() for character in text)


def completion(model: str, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """The body of a greedy completion, in fields that every such server knows."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
