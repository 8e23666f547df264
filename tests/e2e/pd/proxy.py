"""The PD proxy of the tests, as routers in the field behave: each request to a prefill and a decode instance in turn.

    proxy.py --port N --prefill URL[,HOST:PORT] ... --decode URL ... [--order sequential|concurrent]

*Sequential* is what vLLM's toy proxy, vllm-router and llm-d's sidecar do: prefill with max_tokens=1, then decode with
the `kv_transfer_params` of prefill's answer, verbatim, so any connector of the NIXL kind works behind it. *Concurrent*
sends both legs at once under one `transfer_id`; HOST:PORT is where the prefill instance tells about its ranks.

A prefill leg that fails leaves a plain request to the decode instance. A client that leaves takes both legs with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

PATHS = ("/v1/completions", "/v1/chat/completions")
FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, ValueError)  # ValueError: an answer that is not JSON


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill instance: its API, and where its ranks can be asked for (needed for the concurrent order alone)."""

    url: str
    host: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Prefill:
        url, _, address = text.partition(",")
        host, _, port = address.rpartition(":")
        return cls(url, host, int(port)) if address else cls(url)


class Proxy:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self._prefills = itertools.cycle(arguments.prefill)
        self._decodes = itertools.cycle(arguments.decode)
        self._is_concurrent = arguments.order == "concurrent"
        self._prefill_limit = aiohttp.ClientTimeout(total=arguments.prefill_limit_s, sock_connect=5)
        self._decode_limit = aiohttp.ClientTimeout(total=arguments.decode_limit_s, sock_connect=5)

    async def sessions(self, app: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as self._session:
            yield

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prefill, decode = next(self._prefills), next(self._decodes)
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or uuid.uuid4().hex}
        if not self._is_concurrent:
            found = await self._prefill(prefill, request.path, prefill_body(body, {}), headers) or {}
            return await self._decode(request, decode, with_params(body, found.get("kv_transfer_params")), headers)
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        leg = prefill_body(body, {"transfer_id": transfer_id})
        prefilling = asyncio.ensure_future(self._prefill(prefill, request.path, leg, headers))
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_host": prefill.host,
            "remote_port": prefill.port,
        }
        try:
            return await self._decode(request, decode, with_params(body, params), headers)
        finally:
            prefilling.cancel()  # nobody wants it any more, unless it has ended long ago

    async def _prefill(
        self, prefill: Prefill, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """What the prefill instance answered; None if it did not, or not with success."""
        try:
            async with self._session.post(
                prefill.url + path, json=body, headers=headers, timeout=self._prefill_limit
            ) as reply:
                if reply.status == 200:
                    return await reply.json()
                problem: object = f"{reply.status} {(await reply.text())[:500]}"
        except FAILURES as error:
            problem = repr(error)
        print(f"prefill at {prefill.url} failed: {problem}", file=sys.stderr, flush=True)
        return None

    async def _decode(
        self, request: web.Request, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> web.StreamResponse:
        """The decode instance's answer, passed on as it comes."""
        try:
            async with self._session.post(
                url + request.path, json=body, headers=headers, timeout=self._decode_limit
            ) as reply:
                response = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
                try:
                    await response.prepare(request)
                    async for piece in reply.content.iter_any():
                        await response.write(piece)
                except FAILURES as error:
                    print(f"decode at {url} broke off: {error!r}", file=sys.stderr, flush=True)
                    if request.transport is not None:
                        request.transport.abort()  # the status has gone out; all that is left is to cut the connection
                    return response
                await response.write_eof()
                return response
        except FAILURES as error:
            print(f"decode at {url} failed: {error!r}", file=sys.stderr, flush=True)
            return web.json_response({"error": {"message": f"decode instance: {error!r}", "code": 502}}, status=502)


def prefill_body(body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The prefill leg: one token, not streamed, and the request to hand over what was computed."""
    leg = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")}
    leg |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in body:
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        **more,
    }
    return leg


def with_params(body: dict[str, Any], params: dict[str, Any] | None) -> dict[str, Any]:
    return {**body, "kv_transfer_params": params} if params else body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", type=Prefill.parse, action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--order", choices=("sequential", "concurrent"), default="sequential")
    parser.add_argument("--prefill-limit-s", type=float, default=120)
    parser.add_argument("--decode-limit-s", type=float, default=300)
    arguments = parser.parse_args()
    proxy = Proxy(arguments)
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(proxy.sessions)
    app.add_routes([web.get("/health", proxy.health), *(web.post(path, proxy.complete) for path in PATHS)])
    web.run_app(
        app, host="127.0.0.1", port=arguments.port, handler_cancellation=True, print=None, access_log=None
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
