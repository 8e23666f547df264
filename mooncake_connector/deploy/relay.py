"""What the built-in router does with one request: prefill, decode, and the answer passed on as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from dataclasses import dataclass
from typing import Any

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
from mooncake_connector.deploy.fleet import HEALTH_LIMIT_S, NoAnswer, unless_lost
from mooncake_connector.deploy.instances import Group, Instance, Work
from mooncake_connector.deploy.policies import Prompt
from mooncake_connector.deploy.prefixes import Prefixes

PATHS = ("/v1/completions", "/v1/chat/completions")
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
    prompt: Prompt | None = None
    """Where the policy looks at it."""
    work: Work | None = None
    """At the instance that answers."""
    waits_since_s: float = math.inf
    """Since when the next piece of an answer that has begun is waited for."""


class Proxy:
    """An ASGI application. An answer that has begun and then is silent for `silence_s` ends there.

    `prefixes` is where the policy knows from what is cached; None for one that does not ask.
    """

    def __init__(
        self,
        engine: str,
        prefills: Group,
        decodes: Group,
        *,
        concurrent: bool,
        silence_s: float,
        client: Any,
        prefixes: Prefixes | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._prefills, self._decodes, self._client, self._silence_s = prefills, decodes, client, silence_s
        self._serve = {"vllm": self._concurrent if concurrent else self._sequential, "sglang": self._paired}[engine]
        if not prefills.instances:
            self._serve = self._plain
        self._needs_prefill = engine == "sglang" and bool(prefills.instances)

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
            work = self._served(request)
        else:
            raise Answered(404, problem(f"{method} {path}: expected POST of {', '.join(PATHS)}, or GET of /v1/models"))
        try:
            await unless_gone(work, receive)
        except Answered:
            if not request.has_begun:
                raise
            # The client has a part of another answer. Without its end uvicorn closes the connection.

    async def _served(self, request: Request) -> None:
        if self._prefixes is not None:
            among = [*self._prefills.instances, *self._decodes.instances]
            request.prompt = await self._prefixes.find(request.body, request.headers, among)
        await self._serve(request)

    def _computes(self, one: Instance, request: Request) -> Work:
        """An instance is about to be sent a prompt to compute."""
        if self._prefixes is not None and request.prompt is not None:
            self._prefixes.sent(request.prompt, one)
        return Work(one, request.prompt)

    async def _plain(self, request: Request) -> None:
        """Without prefill instances the others compute prompts as well."""
        await self._decoded(request, request.body, computes=True)

    async def _sequential(self, request: Request) -> None:
        """vLLM: prefill, and then decode with what prefill answered. Without prefill, decode computes everything.

        So it does where a request has several prompts: vLLM answers with the parameters of the first alone, and the
        others would keep blocks of the prefill instance until their leases end.
        """
        tried: list[Instance] = []
        params = None
        prompts = prompts_of(request.body)
        while (prompts is None or len(prompts) == 1) and (
            prefill := self._prefills.choose(tried, request.prompt)
        ):
            tried.append(prefill)
            with contextlib.suppress(NoAnswer), self._computes(prefill, request):
                params = (await self._asked(prefill, request, prefill_body(request.body, {}))).get("kv_transfer_params")
                break
        body = {**request.body, "kv_transfer_params": params} if params else request.body
        await self._decoded(request, body, computes=not params)

    async def _concurrent(self, request: Request) -> None:
        """vLLM: both at once, under one name of the transfer; where prefill fails, decode computes."""
        prefill = self._prefills.choose((), request.prompt)
        if prefill is None:
            await self._decoded(request, request.body, computes=True)
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
        with self._computes(prefill, request) as work:
            prefilling = asyncio.create_task(self._asked(prefill, request, body))
            prefilling.add_done_callback(work.end)
            try:
                await self._decoded(request, {**request.body, "kv_transfer_params": params})
            finally:
                await ended(prefilling)  # nobody wants it any more

    async def _paired(self, request: Request) -> None:
        """SGLang: the same to both at once; where one does not answer, all begins anew in another room."""
        tried: list[Instance] = []
        last: Answered | None = None
        while not request.has_begun and (prefill := self._prefills.choose(tried, request.prompt)):
            if (decode := self._decodes.choose(tried)) is None:
                raise last or Answered(503, problem("no decode instance answers"))
            body = paired_body(request.body, prefill.host, prefill.peer_port)
            with self._computes(prefill, request) as work, Work(decode):
                prefilling = asyncio.create_task(self._asked(prefill, request, body))
                prefilling.add_done_callback(work.end)
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

    async def _decoded(self, request: Request, body: Body | None, *, computes: bool = False) -> None:
        """Pass on what a decode instance answers, as it comes; without a body it is asked by GET.

        Whose prompt comes from a prefill instance is chosen by load alone.
        """
        prompt = request.prompt if computes else None
        tried: list[Instance] = []
        last = Answered(503, problem("no decode instance answers"))
        takes_turn = body is not None
        while not request.has_begun and (decode := self._decodes.choose(tried, prompt, takes_turn=takes_turn)):
            tried.append(decode)
            try:
                with self._computes(decode, request) if computes else Work(decode) as request.work:
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
            if request.work is not None:
                request.work.prefilled()
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
