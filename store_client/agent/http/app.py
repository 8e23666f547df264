"""The ASGI application: finds who answers a path, asks for the token, and bounds what comes in.

A fault ends in an answer with status 500, a counter and a line in the log; never in the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from mooncake_connector.config.values import shown
from mooncake_connector.deploy.asgi import Message, Receive, Send
from mooncake_connector.log import get_logger, log_once
from store_client.agent.index.requests import Refused

MAX_BODY_NBYTES = 16 << 20
BODY_S = 30.0
"""For a body to come in."""
_LARGE_AT_ONCE = 16
_LARGE_NBYTES = 1 << 20
"""So many requests may hold more than this at a time; others that want to wait. What is smaller waits for nobody."""
_TURN_S = 30.0
_PIECE_NBYTES = 256 << 10

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    body: bytes


@dataclass(frozen=True, slots=True)
class Response:
    body: Any = None
    """Bytes, or what becomes JSON."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a method of a path, or of all paths below one that ends in "/"."""

    answer: Callable[[Request], Awaitable[Response]]
    needs_token: bool = False
    """Not answered at all where no token is configured."""
    max_body_nbytes: int = MAX_BODY_NBYTES
    answers_large: bool = False


class App:
    """Args:
    routes: by path, then by method.
    token: what a client must send; empty for none.
    """

    def __init__(self, routes: Mapping[str, Mapping[str, Route]], token: bytes) -> None:
        self._routes, self._token = routes, token
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)
        self.counts: Counter[tuple[str, int]] = Counter()
        """Answers by path and status."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        turn = _Turn(self._large)
        try:
            await self._handle(scope, _Body(receive, scope["headers"]), turn, send)
        finally:
            turn.end()

    async def _handle(self, scope: Message, body: _Body, turn: _Turn, send: Send) -> None:
        path = self._known(scope["path"])
        try:
            response = await self._answer(scope, path, body, turn)
        except Refused as error:
            response = Response({"error": str(error), "reason": error.reason}, error.status)
            if error.status == 401:
                response = Response(response.body, 401, {"www-authenticate": "Bearer"})
        except _Gone:
            return
        except Exception as error:
            said = "the agent could not answer %s: %r"
            log_once(f"agent.http:{path}", said, path, error, logger=logger, exc_info=True)
            response = Response({"error": "the agent failed; its log says how", "reason": "fault"}, 500)
        self.counts[path, response.status] += 1
        # What of a body was not read is not waited for, and is no next request.
        await _send(send, response, head=scope["method"] == "HEAD", close=not body.is_read)

    @property
    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        return self._routes

    def _known(self, path: str) -> str:
        """The path's entry, "" where there is none."""
        if path in self._routes:
            return path
        return next((prefix for prefix in self._routes if prefix.endswith("/") and path.startswith(prefix)), "")

    async def _answer(self, scope: Message, path: str, body: _Body, turn: _Turn) -> Response:
        if not path:
            raise Refused(f"path {shown(scope['path'])}: expected one of {', '.join(self._routes)}", 404, "unknown")
        methods = self._routes[path]
        route = methods.get(scope["method"])
        if route is None:
            seen = shown(scope["method"])
            raise Refused(f"method {seen} of {path}: expected {', '.join(methods)}", 405, "method")
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            raise Refused("the request says twice where it ends")
        self._check_token(headers, route, path)
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        try:
            if route.answers_large:
                await asyncio.wait_for(turn.take(), _TURN_S)
        except asyncio.TimeoutError:
            raise Refused(f"{_LARGE_AT_ONCE} large requests are under way: try again", 503, "busy") from None
        with _limit(BODY_S, f"the body did not come within {BODY_S:g} s"):
            data = await body.read(route.max_body_nbytes, turn)
        return await route.answer(Request(scope["method"], scope["path"], query, headers, data))

    def _check_token(self, headers: Mapping[bytes, bytes], route: Route, path: str) -> None:
        if not self._token:
            if route.needs_token:
                raise Refused(f"{path} is closed: set agent_http_token_file to open it", 403, "closed")
            # A page in somebody's browser reaches the loopback too, also under a name that its author points there.
            if b"origin" in headers or not _names_loopback(headers.get(b"host", b"")):
                raise Refused("a browser asks: set agent_http_token_file and send the token", 403, "closed")
            return
        given = headers.get(b"authorization", b"").split(None, 1)
        if len(given) != 2 or given[0].lower() != b"bearer" or not hmac.compare_digest(given[1].strip(), self._token):
            raise Refused("send the token: `Authorization: Bearer TOKEN`, as in agent_http_token_file", 401, "token")


def _names_loopback(host: bytes) -> bool:
    """Whether a Host header has an address, localhost or nothing: names that no stranger can give to this machine."""
    name = host.decode("latin-1").rpartition("]")[0].lstrip("[") or host.decode("latin-1").partition(":")[0]
    if not name or name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _limit(seconds: float, message: str) -> Iterator[None]:
    """`asyncio.wait_for` of what is awaited here, without a task of its own, which takes as long as a short body.

    Raises Refused."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def end() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    except asyncio.CancelledError:
        if not is_late:
            raise
        if sys.version_info >= (3, 11):
            task.uncancel()
        raise Refused(message, 408, "late") from None
    finally:
        timer.cancel()


class _Gone(Exception):
    """The client has left."""


class _Turn:
    """A request's place among those that hold much memory, from when it needs one to its end."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places, self._has_one = places, False

    async def take(self) -> None:
        if not self._has_one:
            await self._places.acquire()
            self._has_one = True

    def end(self) -> None:
        if self._has_one:
            self._places.release()
        self._has_one = False


class _Body:
    def __init__(self, receive: Receive, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._receive = receive
        self.is_read = not any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0")) for name, value in headers
        )
        """Whether nothing of it is still to come."""

    async def read(self, most_nbytes: int, turn: _Turn) -> bytes:
        """Raises Refused and _Gone."""
        pieces, nbytes = [], 0
        while not self.is_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            piece = message.get("body", b"")
            pieces.append(piece)
            nbytes += len(piece)
            if nbytes > most_nbytes:
                raise Refused(f"the body has more than {most_nbytes} bytes", 413, "large")
            if nbytes > _LARGE_NBYTES:
                await turn.take()
            self.is_read = not message.get("more_body")
        return b"".join(pieces)


async def _send(send: Send, response: Response, *, head: bool, close: bool) -> None:
    is_bytes = isinstance(response.body, bytes)
    body = response.body if is_bytes else b"" if response.body is None else msgspec.json.encode(response.body) + b"\n"
    headers = {"content-type": "application/octet-stream" if is_bytes else "application/json", **response.headers}
    headers.setdefault("content-length", str(len(body)))
    if close:
        headers["connection"] = "close"
    await send(
        {
            "type": "http.response.start", "status": response.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )  # fmt: skip
    start, stop = 0, 0 if head else len(body)
    while stop - start > _PIECE_NBYTES:  # each waits until a client has taken the one before
        await send({"type": "http.response.body", "body": body[start : start + _PIECE_NBYTES], "more_body": True})
        start += _PIECE_NBYTES
    await send({"type": "http.response.body", "body": body[start:stop]})
