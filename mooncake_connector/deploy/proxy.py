"""The built-in router: an OpenAI-compatible proxy before prefill and decode instances of one engine.

    python -m mooncake_connector.deploy.proxy --engine vllm --port 8000 --prefill URL,PORT[,HOST] ... --decode URL ...

PORT is where decode instances find the prefill instance: SGLang's bootstrap port, or vLLM's `transfer_port`, which only
the concurrent order needs, as it does HOST, the first of vLLM's `transfer_hosts` where these are set. What
the engines are sent is in docs/disaggregation.md. It needs httpx and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn

from mooncake_connector.deploy.bodies import Body, paired_body, prefill_body

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY_NBYTES = 64 << 20
HEALTH_EVERY_S, HEALTH_LIMIT_S = 1.0, 20.0
CONNECT_LIMIT_S, ANSWER_LIMIT_S = 5.0, 3600.0
_PASSED_ON = (b"authorization", b"x-request-id", b"traceparent")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class NoAnswer(Exception):
    """An instance did not answer, so another may be asked."""


class Answered(Exception):
    """What the client is told instead of an answer."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status, self.content = status, content


@dataclass(slots=True)
class Instance:
    """`load` counts requests under way."""

    url: str
    peer_port: int = 0
    peer_host: str = ""
    healthy: bool = False
    load: int = 0

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""


@dataclass(slots=True)
class Group:
    """The instances of one role."""

    instances: Sequence[Instance]
    by_load: bool
    _turn: int = 0

    def choose(self, tried: Sequence[Instance]) -> Instance | None:
        """The next healthy one that was not tried; None where there is none."""
        self._turn += 1
        order = [self.instances[(self._turn + at) % len(self.instances)] for at in range(len(self.instances))]
        left = [one for one in order if one.healthy and one not in tried]
        return min(left, key=lambda one: one.load if self.by_load else 0, default=None)

    @property
    def healthy(self) -> bool:
        return any(one.healthy for one in self.instances)


@contextlib.contextmanager
def busy(*instances: Instance | None) -> Iterator[None]:
    for one in instances:
        if one is not None:
            one.load += 1
    try:
        yield
    finally:
        for one in instances:
            if one is not None:
                one.load -= 1


@dataclass(slots=True)
class Request:
    """One request of a client, on its way through."""

    path: str
    body: Body
    headers: dict[bytes, bytes]
    send: Send
    has_begun: bool = False
    """Whether the client has got anything."""


class Proxy:
    """An ASGI application."""

    def __init__(self, engine: str, prefills: Group, decodes: Group, *, concurrent: bool, client: Any) -> None:
        self._prefills, self._decodes, self._client = prefills, decodes, client
        self._serve = {"vllm": self._concurrent if concurrent else self._sequential, "sglang": self._paired}[engine]
        self._needs_prefill = engine == "sglang"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except Answered as answer:
            await reply(send, answer.status, answer.content)

    async def look(self) -> None:
        """Ask every instance how it does, for ever."""

        async def ask(one: Instance) -> None:
            while True:
                try:
                    found = await self._client.get(f"{one.url}/health", timeout=HEALTH_LIMIT_S)
                    one.healthy = found.status_code == 200
                except httpx.HTTPError:
                    one.healthy = False
                await asyncio.sleep(HEALTH_EVERY_S)

        await asyncio.gather(*(ask(one) for one in (*self._prefills.instances, *self._decodes.instances)))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health":
            well = self._decodes.healthy and (self._prefills.healthy or not self._needs_prefill)
            raise Answered(200 if well else 503, b"")
        passed = {name: value for name, value in scope["headers"] if name in _PASSED_ON}
        if path == "/v1/models" and method == "GET":
            request = Request(path, {}, passed, send)
            work = self._decoded(request, None)
        elif path in PATHS and method == "POST":
            passed.setdefault(b"x-request-id", uuid.uuid4().hex.encode())
            body = await read_body(receive)
            body.pop("kv_transfer_params", None)  # whom an instance asks for KV is not for a client to say
            request = Request(path, body, passed, send)
            work = self._serve(request)
        else:
            raise Answered(404, problem(f"{method} {path}: expected POST of {', '.join(PATHS)}, or GET of /v1/models"))
        await unless_gone(work, receive)

    async def _sequential(self, request: Request) -> None:
        """vLLM: prefill, and then decode with what prefill answered. Without prefill, decode computes everything."""
        tried: list[Instance] = []
        params = None
        while params is None and (prefill := self._prefills.choose(tried)):
            tried.append(prefill)
            with contextlib.suppress(NoAnswer), busy(prefill):
                params = (await self._asked(prefill, request, prefill_body(request.body, {}))).get("kv_transfer_params")
                break
        body = {**request.body, "kv_transfer_params": params} if params else request.body
        await self._decoded(request, body)

    async def _concurrent(self, request: Request) -> None:
        """vLLM: both at once, under one name of the transfer; where prefill fails, decode computes."""
        prefill = self._prefills.choose(())
        if prefill is None:
            await self._decoded(request, request.body)
            return
        transfer_id = uuid.uuid4().hex
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_host": prefill.peer_host,
            "remote_port": prefill.peer_port,
        }
        body = prefill_body(request.body, {"transfer_id": transfer_id})
        with busy(prefill):
            prefilling = asyncio.create_task(self._asked(prefill, request, body))
            try:
                await self._decoded(request, {**request.body, "kv_transfer_params": params})
            finally:
                await ended(prefilling)  # nobody wants it any more

    async def _paired(self, request: Request) -> None:
        """SGLang: the same to both at once; where one does not answer, all begins anew in another room."""
        tried: list[Instance] = []
        while prefill := self._prefills.choose(tried):
            if (decode := self._decodes.choose(tried)) is None:
                raise Answered(503, problem("no decode instance answers"))
            rid = uuid.uuid4().hex
            body = paired_body(request.body, prefill.host, prefill.peer_port, rid)
            with busy(prefill, decode):
                prefilling = asyncio.create_task(self._asked(prefill, request, body))
                decoding = asyncio.create_task(self._passed_on(decode, request, body))
                try:
                    await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
                    if prefilling.done() and not request.has_begun:
                        prefilling.result()
                    await decoding
                    return
                except NoAnswer:
                    by_decode = decoding.done() and isinstance(decoding.exception(), NoAnswer)
                    tried.append(decode if by_decode else prefill)
                finally:
                    is_answered = decoding.done() and not decoding.cancelled() and decoding.exception() is None
                    await ended(prefilling, decoding)
                    if not is_answered:
                        await self._abort(rid, prefill, decode)
        raise Answered(503, problem("no prefill instance answers, and SGLang's decode instances compute no prompts"))

    async def _abort(self, rid: str, *asked: Instance) -> None:
        """SGLang does not always notice that a client has left."""
        for one in asked:
            with contextlib.suppress(httpx.HTTPError):
                await asyncio.shield(self._client.post(f"{one.url}/abort_request", json={"rid": rid}, timeout=2))

    async def _asked(self, prefill: Instance, request: Request, body: Body) -> Body:
        """What a prefill instance answered. Raises NoAnswer, and Answered where it refuses the request."""
        found = await self._answer_of(prefill, self._client.send(self._made(prefill, request, body)))
        if 400 <= found.status_code < 500:
            raise Answered(found.status_code, found.content)
        if found.status_code != 200:
            raise NoAnswer
        if body.get("stream"):
            return {}
        try:
            answer = found.json()
        except ValueError:
            raise NoAnswer from None
        return answer if isinstance(answer, dict) else {}

    async def _decoded(self, request: Request, body: Body | None) -> None:
        """Pass on what a decode instance answers, as it comes; without a body it is asked by GET."""
        tried: list[Instance] = []
        while decode := self._decodes.choose(tried):
            tried.append(decode)
            with contextlib.suppress(NoAnswer), busy(decode):
                await self._passed_on(decode, request, body)
                return
        raise Answered(503, problem("no decode instance answers"))

    async def _passed_on(self, decode: Instance, request: Request, body: Body | None) -> None:
        found = await self._answer_of(decode, self._client.send(self._made(decode, request, body), stream=True))
        try:
            if found.status_code == 503:
                raise NoAnswer
            kind = found.headers.get("content-type", "application/json").encode()
            request.has_begun = True
            await request.send(
                {"type": "http.response.start", "status": found.status_code, "headers": [(b"content-type", kind)]}
            )
            async for piece in found.aiter_raw():  # an error in it leaves nothing but to cut the client's connection
                await request.send({"type": "http.response.body", "body": piece, "more_body": True})
            await request.send({"type": "http.response.body", "body": b""})
        finally:
            await found.aclose()

    def _made(self, one: Instance, request: Request, body: Body | None) -> Any:
        """httpx's own JSON refuses what a client's may hold: NaN, and halves of surrogate pairs."""
        url = one.url + request.path
        if body is None:
            return self._client.build_request("GET", url, headers=request.headers)
        headers = {**request.headers, b"content-type": b"application/json"}
        return self._client.build_request("POST", url, content=json.dumps(body), headers=headers)

    async def _answer_of(self, one: Instance, answering: Awaitable[Any]) -> Any:
        """Raises NoAnswer where the connection breaks, or the instance stops to answer /health meanwhile."""
        task = asyncio.ensure_future(answering)
        try:
            while not task.done() and one.healthy:
                await asyncio.wait((task,), timeout=HEALTH_EVERY_S)
            if task.done():
                return task.result()
            reason = "/health"
        except httpx.TransportError as error:
            one.healthy, reason = False, repr(error)  # until it says otherwise
        finally:
            await ended(task)
        print(f"{one.url} does not answer: {reason}", file=sys.stderr, flush=True)
        raise NoAnswer


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


def instance(text: str) -> Instance:
    url, _, peer = text.partition(",")
    port, _, host = peer.partition(",")
    return Instance(url.rstrip("/"), int(port or 0), host or "127.0.0.1")


async def serve(arguments: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(ANSWER_LIMIT_S, connect=CONNECT_LIMIT_S)
    plain = {"accept-encoding": "identity"}  # what decode answers is passed on as it is
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=plain, trust_env=False) as client:
        groups = [Group(of, arguments.policy == "least-loaded") for of in (arguments.prefill, arguments.decode)]
        proxy = Proxy(arguments.engine, *groups, concurrent=arguments.order == "concurrent", client=client)
        looking = asyncio.create_task(proxy.look())
        config = uvicorn.Config(
            proxy, host=arguments.host, port=arguments.port, log_level="warning", lifespan="off",
            timeout_graceful_shutdown=5,
        )  # fmt: skip
        try:
            await uvicorn.Server(config).serve()
        finally:
            await ended(looking)


def main() -> None:
    parser = argparse.ArgumentParser(prog="mooncake_connector.deploy.proxy")
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", type=instance, action="append", required=True)
    parser.add_argument("--decode", type=instance, action="append", required=True)
    parser.add_argument("--order", choices=("sequential", "concurrent"), default="sequential")
    parser.add_argument("--policy", choices=("round-robin", "least-loaded"), default="round-robin")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a request takes three, and 1024 are usual
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
