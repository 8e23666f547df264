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
import math
import resource
import time
import uuid
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from mooncake_connector.deploy.asgi import (
    Answered,
    Message,
    Receive,
    Send,
    ended,
    problem,
    read_body,
    reply,
    unless_gone,
)
from mooncake_connector.deploy.bodies import Body, address_of, paired_body, prefill_body, prompts_of
from mooncake_connector.deploy.fleet import HEALTH_LIMIT_S, Group, Instance, NoAnswer, busy, instance, look, unless_lost
from mooncake_connector.deploy.schema import SILENCE_DEADLINE_S

PATHS = ("/v1/completions", "/v1/chat/completions")
CONNECT_LIMIT_S, ANSWER_LIMIT_S = 5.0, 3600.0
_ABORT_LIMIT_S = 2.0
_PASSED_ON = (b"authorization", b"x-request-id", b"traceparent")


@dataclass(slots=True)
class Request:
    """One request of a client, on its way through."""

    path: str
    body: Body
    headers: dict[bytes, bytes]
    send: Send
    has_begun: bool = False
    """Whether the client has got anything."""
    is_answered: bool = False
    """Whether the client gets the end of what it asked for, and no error."""
    waits_since_s: float = math.inf
    """Since when the next piece of an answer that has begun is waited for."""


class Proxy:
    """An ASGI application. An answer that has begun and then is silent for `silence_s` ends there."""

    def __init__(
        self, engine: str, prefills: Group, decodes: Group, *, concurrent: bool, silence_s: float, client: Any
    ) -> None:
        self._prefills, self._decodes, self._client, self._silence_s = prefills, decodes, client, silence_s
        self._serve = {"vllm": self._concurrent if concurrent else self._sequential, "sglang": self._paired}[engine]
        self._needs_prefill = engine == "sglang"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except Answered as answer:
            await reply(send, answer.status, answer.content)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == "/health":
            well = self._decodes.healthy and (self._prefills.healthy or not self._needs_prefill)
            raise Answered(200 if well else 503, b"")
        # uvicorn leaves spaces at the end of a value, and httpx sends none that has them.
        passed = {name: value.strip() for name, value in scope["headers"] if name in _PASSED_ON}
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
        try:
            await unless_gone(work, receive)
        except Answered:
            if not request.has_begun:
                raise
            # The client has a part of another answer. Without its end uvicorn closes the connection.

    async def _sequential(self, request: Request) -> None:
        """vLLM: prefill, and then decode with what prefill answered. Without prefill, decode computes everything.

        So it does where a request has several prompts: vLLM answers with the parameters of the first alone, and the
        others would keep blocks of the prefill instance until their leases end.
        """
        tried: list[Instance] = []
        params = None
        prompts = prompts_of(request.body)
        while (prompts is None or len(prompts) == 1) and (prefill := self._prefills.choose(tried)):
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
            "remote_host": await address_of(prefill.peer_host),
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
        last: Answered | None = None
        while not request.has_begun and (prefill := self._prefills.choose(tried)):
            if (decode := self._decodes.choose(tried)) is None:
                raise last or Answered(503, problem("no decode instance answers"))
            body = paired_body(request.body, prefill.host, prefill.peer_port)
            with busy(prefill, decode):
                prefilling = asyncio.create_task(self._asked(prefill, request, body))
                decoding = asyncio.create_task(self._passed_on(decode, request, body))
                try:
                    await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
                    if prefilling.done() and not request.has_begun:
                        prefilling.result()
                    await decoding
                    return
                except NoAnswer as error:
                    by_decode = decoding.done() and isinstance(decoding.exception(), NoAnswer)
                    tried.append(decode if by_decode else prefill)
                    last = error.answer or last
                finally:
                    try:
                        await ended(prefilling, decoding)
                    finally:
                        if not request.is_answered:
                            await self._abort(request, body["rid"], prefill, decode)
        why = "no prefill instance answers, and SGLang's decode instances compute no prompts"
        raise last or Answered(503, problem(why))

    async def _abort(self, request: Request, rids: str | list[str], *asked: Instance) -> None:
        """SGLang does not always notice that a client has left, and never that its other instance has refused."""
        named = [rids] if isinstance(rids, str) else rids
        await asyncio.shield(
            asyncio.gather(
                *(
                    self._client.post(
                        f"{one.url}/abort_request", json={"rid": rid}, headers=request.headers, timeout=_ABORT_LIMIT_S
                    )
                    for one in asked
                    for rid in named
                ),
                return_exceptions=True,
            )
        )

    async def _asked(self, prefill: Instance, request: Request, body: Body) -> Body:
        """What a prefill instance answered. Raises NoAnswer, and Answered where it refuses the request."""
        asking = self._client.send(self._made(prefill, request, body))
        found = await unless_lost(prefill, asking, lambda: "" if prefill.healthy else "/health")
        if 400 <= found.status_code < 500:
            raise Answered(found.status_code, found.content)
        if found.status_code != 200:
            raise NoAnswer(Answered(found.status_code, found.content))
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
        last = Answered(503, problem("no decode instance answers"))
        takes_turn = body is not None
        while not request.has_begun and (decode := self._decodes.choose(tried, takes_turn=takes_turn)):
            tried.append(decode)
            try:
                with busy(decode):
                    await self._passed_on(decode, request, body)
                return
            except NoAnswer as error:
                last = error.answer or last
        raise last

    async def _passed_on(self, decode: Instance, request: Request, body: Body | None) -> None:
        await unless_lost(decode, self._copied(decode, request, body), lambda: self._why_lost(decode, request))

    async def _copied(self, decode: Instance, request: Request, body: Body | None) -> None:
        found = await self._client.send(self._made(decode, request, body), stream=True)
        try:
            if found.status_code == 503:
                raise NoAnswer(Answered(503, await found.aread()))
            async for piece in found.aiter_raw():
                request.waits_since_s = math.inf  # a client may take its time
                await self._begin(found, request)
                await request.send({"type": "http.response.body", "body": piece, "more_body": True})
                request.waits_since_s = time.monotonic()
            await self._begin(found, request)
            request.is_answered = found.status_code == 200
            await request.send({"type": "http.response.body", "body": b""})
        finally:
            await found.aclose()

    async def _begin(self, found: Any, request: Request) -> None:
        """With the first piece: engines send the headers of a stream before they have computed anything."""
        if not request.has_begun:
            request.has_begun = True
            kind = found.headers.get("content-type", "application/json").encode()
            await request.send(
                {"type": "http.response.start", "status": found.status_code, "headers": [(b"content-type", kind)]}
            )

    def _made(self, one: Instance, request: Request, body: Body | None) -> Any:
        """httpx's own JSON refuses what a client's may hold: NaN, and halves of surrogate pairs."""
        url = one.url + request.path
        if body is None:
            return self._client.build_request("GET", url, headers=request.headers)
        headers = {**request.headers, b"content-type": b"application/json"}
        return self._client.build_request("POST", url, content=json.dumps(body), headers=headers)

    def _why_lost(self, decode: Instance, request: Request) -> str:
        """An instance that is too busy to answer /health may still go on with what it has begun."""
        if not request.has_begun:
            return "" if decode.healthy else "/health"
        silent_s = time.monotonic() - request.waits_since_s
        if silent_s > self._silence_s:
            return f"silent for {self._silence_s:g} s in the middle of an answer"
        return "/health, in the middle of an answer" if not decode.healthy and silent_s > HEALTH_LIMIT_S else ""


async def serve(arguments: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(ANSWER_LIMIT_S, connect=CONNECT_LIMIT_S)
    plain = {"accept-encoding": "identity"}  # what decode answers is passed on as it is
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=plain, trust_env=False) as client:
        groups = [Group(of, arguments.policy == "least-loaded") for of in (arguments.prefill, arguments.decode)]
        concurrent, silence_s = arguments.order == "concurrent", arguments.silence_deadline_s
        proxy = Proxy(arguments.engine, *groups, concurrent=concurrent, silence_s=silence_s, client=client)
        looking = asyncio.create_task(look(client, (*arguments.prefill, *arguments.decode)))
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
    parser.add_argument("--silence-deadline-s", type=float, default=SILENCE_DEADLINE_S)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a request takes three, and 1024 are usual
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
