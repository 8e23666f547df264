"""An OpenAI-compatible server as a client sees it: pages and streamed completions.

Every call has a deadline over all of it, and ends at once when its `Calls` are ended from another thread.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.serve.sse import EventStream
from mooncake_connector.cli.bench.serve.workload import Prompt

_SHORT_S = 15.0
_SHOWN = 300
_LARGEST = 32 << 20
_MOST_TOKENS = 1 << 40
"""A larger count is no count of tokens."""


class RequestFailed(Exception):
    """One call failed; the message says how. `status` is the server's, where it answered."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion. Token ids are there if the server sends them; counts if it reports its usage."""

    first_token_s: float
    whole_s: float
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int | None
    cached_tokens: int | None


class Calls:
    """The connections that are open, so that all can be ended at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._ended = False

    def end(self) -> None:
        """End what is under way; what begins later fails."""
        with self._lock:
            self._ended = True
            for connected in self._open:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def holding(self, connected: socket.socket) -> Iterator[None]:
        """While a call uses this socket. Raises RequestFailed where all were ended before."""
        with self._lock:
            if self._ended:
                raise RequestFailed("stopped")
            self._open.add(connected)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connected)


@dataclass(frozen=True)
class Server:
    """A server by its address; `path` is what comes before `/v1`."""

    host: str
    port: int
    secure: bool = False
    path: str = ""
    api_key: str | None = field(default=None, repr=False)
    calls: Calls = field(default_factory=Calls, repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.secure else ''}://{host}:{self.port}{self.path}"

    def get(self, path: str, limit_s: float = _SHORT_S) -> tuple[int, str, bytes]:
        """Status, content type and content. Raises RequestFailed where there is no answer."""
        deadline = time.monotonic() + limit_s
        with self._asked("GET", path, None, deadline) as reply:
            return reply.status, reply.headers.get_content_type(), _whole(reply, deadline)

    def is_healthy(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except RequestFailed:
            return False

    def stream(self, body: dict[str, Any], limit_s: float) -> Answer:
        """A completion. Raises RequestFailed for whatever is not a whole answer in time."""
        start = time.monotonic()
        deadline = start + limit_s
        with self._asked("POST", "/v1/completions", {**body, "stream": True}, deadline) as reply:
            if reply.status != 200:
                content = _whole(reply, deadline)
                raise RequestFailed(f"answered {reply.status}: {error_text(content)}", reply.status)
            kind = reply.headers.get_content_type()
            if kind != "text/event-stream":
                raise RequestFailed(f"answered with {kind} instead of a stream of events (text/event-stream)")
            reader = _AnswerReader(start)
            for piece in _pieces(reply, deadline):
                reader.take(piece)
            return reader.answer()

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: Any, deadline: float) -> Iterator[http.client.HTTPResponse]:
        """The reply. Raises RequestFailed for whatever goes wrong while it is read, too."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        content = None if body is None else json.dumps(body)
        connection = http.client.HTTPConnection(self.host, self.port)
        with contextlib.closing(connection), contextlib.ExitStack() as stack:
            try:
                connection.sock = self._reached(stack, deadline)
                connection.request(method, self.path + path, content, headers)
                with connection.getresponse() as reply:
                    if time.monotonic() >= deadline:  # the headers may be cut off
                        raise TimeoutError
                    yield reply
            except RequestFailed:
                raise
            except Exception as error:  # a strange server has many ways to trip up whoever reads its answer
                if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
                    raise RequestFailed("did not answer in time") from error
                raise RequestFailed(f"{type(error).__name__}: {error}") from error

    def _reached(self, stack: contextlib.ExitStack, deadline: float) -> socket.socket:
        """A connection, which ends at the deadline and with `calls`, while it is made and as long as `stack` is."""
        last: OSError = OSError("its name has no address")
        for family, kind, protocol, _, address in _addresses(self.host, self.port, deadline):
            sock = stack.enter_context(contextlib.closing(socket.socket(family, kind, protocol)))
            sock.settimeout(_left(deadline))
            try:
                with self.calls.holding(sock):
                    sock.connect(address)
            except OSError as error:
                last = error
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.secure:
                secured = ssl.create_default_context().wrap_socket(
                    sock, server_hostname=self.host, do_handshake_on_connect=False
                )
                sock = stack.enter_context(contextlib.closing(secured))
            stack.enter_context(self.calls.holding(sock))
            stack.enter_context(_ended_at(deadline, sock))
            if isinstance(sock, ssl.SSLSocket):
                sock.settimeout(_left(deadline))
                sock.do_handshake()
            return sock
        raise last


def _left(deadline: float) -> float:
    """Seconds until then. Raises TimeoutError where it is over."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _addresses(host: str, port: int, deadline: float) -> Iterable[Any]:
    """As `socket.getaddrinfo`, which knows no deadline. Raises OSError."""
    found: list[Any] = []
    ended = threading.Event()

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)
        ended.set()

    threading.Thread(target=look_up, daemon=True).start()
    if not ended.wait(_left(deadline)):
        raise TimeoutError
    if isinstance(found[0], Exception):
        raise found[0]
    addresses: Iterable[Any] = found[0]
    return addresses


@contextlib.contextmanager
def _ended_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """Ends the connection at the deadline: the socket's own timeout begins anew with each byte that arrives."""

    def end() -> None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(0.0, deadline - time.monotonic()), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


def error_text(content: bytes) -> str:
    """What a server says in the body of an error, on one short line."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(content)
        inner = found.get("error") or found
        message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
        if isinstance(message, str):
            return _short(message)
    return _short(content.decode(errors="replace")) or "nothing"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line)[:_SHOWN]


def _pieces(reply: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    """What arrives, as it arrives, until the end or the deadline. Raises TimeoutError."""
    while True:
        piece = reply.read1(1 << 16)
        if time.monotonic() >= deadline:
            raise TimeoutError
        if not piece:
            return
        yield piece


def _whole(reply: http.client.HTTPResponse, deadline: float) -> bytes:
    content = bytearray()
    for piece in _pieces(reply, deadline):
        content += piece
        if len(content) > _LARGEST:
            raise RequestFailed(f"sent more than {_LARGEST >> 20} MiB")
    return bytes(content)


class _AnswerReader:
    """Puts the events of a completion together."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._events = EventStream()
        self._first: float | None = None
        self._last = start
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finished = False

    def take(self, piece: bytes) -> None:
        self._take(self._events.feed(piece))

    def answer(self) -> Answer:
        self._take(self._events.end())
        if not self._finished:
            raise RequestFailed("the stream ended before the answer did")
        if self._first is None:
            raise RequestFailed("the answer is empty")
        return Answer(
            first_token_s=self._first - self._start,
            whole_s=self._last - self._start,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            prompt_tokens=_count(self._usage, "prompt_tokens"),
            cached_tokens=_count(self._usage.get("prompt_tokens_details"), "cached_tokens"),
        )

    def _take(self, events: list[str]) -> None:
        for data in events:
            if data == "[DONE]":
                self._finished = True
                continue
            event = json.loads(data)
            if not isinstance(event, dict):
                raise RequestFailed(f"sent an event that is no object: {_short(data)}")
            if event.get("error"):
                raise RequestFailed(f"failed while it answered: {error_text(data.encode())}")
            try:
                self._usage = {**self._usage, **(event.get("usage") or {})}
                for choice in event.get("choices") or ():
                    self._take_choice(choice)
            except (TypeError, AttributeError):
                raise RequestFailed(f"sent an event of no known form: {_short(data)}") from None

    def _take_choice(self, choice: dict[str, Any]) -> None:
        text, token_ids = choice.get("text") or "", choice.get("token_ids") or ()
        if text or token_ids or choice.get("finish_reason"):  # the only token may be a part of a character: no text
            self._last = time.monotonic()
            self._first = self._first or self._last
        self._text.append(text + "")
        self._token_ids.extend(token_ids)
        self._finished = self._finished or bool(choice.get("finish_reason"))


def _count(found: Any, name: str) -> int | None:
    value = found.get(name) if isinstance(found, dict) else None
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else None
