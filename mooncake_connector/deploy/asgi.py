"""What an ASGI application needs that speaks JSON: a request's body, an answer, and to stop when a client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mooncake_connector.deploy.bodies import Body

MAX_BODY_NBYTES = 64 << 20

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Answered(Exception):
    """What the client is told instead of an answer."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status, self.content = status, content


async def read_body(receive: Receive) -> Body:
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Answered(499, b"")
        data += message.get("body", b"")
        if len(data) > MAX_BODY_NBYTES:
            raise Answered(413, problem(f"the request has more than {MAX_BODY_NBYTES} bytes"))
        if not message.get("more_body"):
            break
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Answered(400, problem(f"the request is no JSON: {error}")) from None
    if not isinstance(body, dict):
        raise Answered(400, problem("the request is no JSON object"))
    return body


async def unless_gone(work: Awaitable[None], receive: Receive) -> None:
    """Do the work until the client leaves; then cancel it, which closes the connections to the instances."""

    async def leaving() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(leaving())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        await ended(working, gone)


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them, once each: a second time would interrupt what closes their connections."""
    for task in tasks:
        task.cancel()
    again: asyncio.CancelledError | None = None
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            again = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen
    if again is not None:
        raise again


async def reply(send: Send, status: int, content: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def problem(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "mooncake_connector"}}).encode()
