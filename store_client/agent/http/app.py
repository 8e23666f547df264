"""The ASGI application: finds who answers a path, asks for the token, and bounds what comes in.

A fault ends in an answer with status 500, a counter and a line in the log; never in the agent.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
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
_BODIES_AT_ONCE = 16
"""In memory; further requests wait."""

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


class App:
    """Args:
    routes: by path, then by method.
    token: what a client must send; empty for none.
    """

    def __init__(self, routes: Mapping[str, Mapping[str, Route]], token: bytes) -> None:
        self._routes, self._token = routes, token
        self._bodies = asyncio.Semaphore(_BODIES_AT_ONCE)
        self.counts: Counter[tuple[str, int]] = Counter()
        """Answers by path and status."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = self._known(scope["path"])
        try:
            response = await self._answer(scope, path, receive)
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
        await _send(send, response, head=scope["method"] == "HEAD")

    @property
    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        return self._routes

    def _known(self, path: str) -> str:
        """The path's entry, "" where there is none."""
        if path in self._routes:
            return path
        return next((prefix for prefix in self._routes if prefix.endswith("/") and path.startswith(prefix)), "")

    async def _answer(self, scope: Message, path: str, receive: Receive) -> Response:
        if not path:
            raise Refused(f"path {shown(scope['path'])}: expected one of {', '.join(self._routes)}", 404, "unknown")
        methods = self._routes[path]
        route = methods.get(scope["method"])
        if route is None:
            raise Refused(f"method {scope['method']} of {path}: expected {', '.join(methods)}", 405, "method")
        headers = dict(scope["headers"])
        self._check_token(headers, route, path)
        query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
        async with self._bodies:
            try:
                body = await asyncio.wait_for(_read(receive, route.max_body_nbytes), BODY_S)
            except asyncio.TimeoutError:
                raise Refused(f"the body did not come within {BODY_S:g} s", 408, "late") from None
            return await route.answer(Request(scope["method"], scope["path"], query, headers, body))

    def _check_token(self, headers: Mapping[bytes, bytes], route: Route, path: str) -> None:
        if not self._token:
            if route.needs_token:
                raise Refused(f"{path} is closed: set agent_http_token_file to open it", 403, "closed")
            if b"origin" in headers:  # a page in somebody's browser reaches the loopback too
                raise Refused("a browser asks: set agent_http_token_file and send the token", 403, "closed")
            return
        given = headers.get(b"authorization", b"").split(None, 1)
        if len(given) != 2 or given[0].lower() != b"bearer" or not hmac.compare_digest(given[1].strip(), self._token):
            raise Refused("send the token: `Authorization: Bearer TOKEN`, as in agent_http_token_file", 401, "token")


class _Gone(Exception):
    """The client has left."""


async def _read(receive: Receive, most_nbytes: int) -> bytes:
    pieces, nbytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        piece = message.get("body", b"")
        pieces.append(piece)
        nbytes += len(piece)
        if nbytes > most_nbytes:
            raise Refused(f"the body has more than {most_nbytes} bytes", 413, "large")
        if not message.get("more_body"):
            return b"".join(pieces)


async def _send(send: Send, response: Response, *, head: bool) -> None:
    is_bytes = isinstance(response.body, bytes)
    body = response.body if is_bytes else b"" if response.body is None else msgspec.json.encode(response.body) + b"\n"
    headers = {"content-type": "application/octet-stream" if is_bytes else "application/json", **response.headers}
    headers.setdefault("content-length", str(len(body)))
    await send(
        {
            "type": "http.response.start", "status": response.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )  # fmt: skip
    await send({"type": "http.response.body", "body": b"" if head else body})
