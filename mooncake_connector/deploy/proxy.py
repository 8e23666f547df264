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
import resource
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from mooncake_connector.config.secret import read_secret
from mooncake_connector.deploy.asgi import ended
from mooncake_connector.deploy.figures import Measured
from mooncake_connector.deploy.fleet import look
from mooncake_connector.deploy.index import Index
from mooncake_connector.deploy.instances import Group, instance
from mooncake_connector.deploy.policies import (
    CACHE_WEIGHT,
    PREFILL_WEIGHT,
    REQUEST_WEIGHT,
    Conductor,
    LeastLoaded,
    Policy,
    RoundRobin,
    Weights,
)
from mooncake_connector.deploy.prefixes import Prefixes, Routed
from mooncake_connector.deploy.relay import Proxy
from mooncake_connector.deploy.schema import INDEX_DEADLINE_S, SILENCE_DEADLINE_S

CONNECT_LIMIT_S, ANSWER_LIMIT_S = 5.0, 3600.0


async def serve(arguments: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(ANSWER_LIMIT_S, connect=CONNECT_LIMIT_S)
    plain = {"accept-encoding": "identity"}  # what decode answers is passed on as it is
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=plain, trust_env=False) as client:
        instances = {"prefill": arguments.prefill, "decode": arguments.decode}
        groups = {role: Group(of, _policy(arguments)) for role, of in instances.items()}
        prefixes = _prefixes(arguments, client)
        concurrent, silence_s = arguments.order == "concurrent", arguments.silence_deadline_s
        proxy = Proxy(
            arguments.engine, *groups.values(), concurrent=concurrent, silence_s=silence_s, client=client,
            prefixes=prefixes,
        )  # fmt: skip
        looking = asyncio.create_task(look(client, (*arguments.prefill, *arguments.decode)))
        registering = asyncio.create_task(_register(prefixes, arguments))
        config = uvicorn.Config(
            Measured(proxy, groups, prefixes), host=arguments.host, port=arguments.port, log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=5,
        )  # fmt: skip
        try:
            await uvicorn.Server(config).serve()
        finally:
            await ended(looking, registering)


def _policy(arguments: argparse.Namespace) -> Policy:
    if arguments.policy == "conductor":
        weights = Weights(arguments.cache_weight, arguments.request_weight, arguments.prefill_weight)
        return Conductor(weights, arguments.candidates)
    return LeastLoaded() if arguments.policy == "least-loaded" else RoundRobin()


def _prefixes(arguments: argparse.Namespace, client: Any) -> Prefixes | None:
    if arguments.policy != "conductor":
        return None
    if arguments.index is None:
        return Routed()
    token = arguments.index_token_file
    return Index(
        arguments.index, block_tokens=arguments.index_block_tokens, deadline_s=arguments.index_deadline_s,
        token=read_secret(token, "index_token_file") if token else b"", client=client,
    )  # fmt: skip


async def _register(prefixes: Prefixes | None, arguments: argparse.Namespace) -> None:
    if isinstance(prefixes, Index):
        kind = {"vllm": "vLLM", "sglang": "SGLang"}[arguments.engine]
        await prefixes.keep_registered(kind, [tuple(one.split(",")) for one in arguments.events])


def main() -> None:
    parser = argparse.ArgumentParser(prog="mooncake_connector.deploy.proxy")
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", type=instance, action="append", default=[])
    parser.add_argument("--decode", type=instance, action="append", required=True)
    parser.add_argument("--order", choices=("sequential", "concurrent"), default="sequential")
    parser.add_argument("--policy", choices=("round-robin", "least-loaded", "conductor"), default="round-robin")
    given = parser.add_argument_group("conductor", "what each term counts, and where it knows from what is cached")
    given.add_argument("--cache-weight", type=float, default=CACHE_WEIGHT)
    given.add_argument("--request-weight", type=float, default=REQUEST_WEIGHT)
    given.add_argument("--prefill-weight", type=float, default=PREFILL_WEIGHT)
    given.add_argument("--candidates", type=int, default=1)
    given.add_argument("--index", metavar="URL")
    given.add_argument("--index-block-tokens", type=int, default=64)
    given.add_argument("--index-deadline-s", type=float, default=INDEX_DEADLINE_S)
    given.add_argument("--index-token-file", type=Path)
    given.add_argument("--events", metavar="URL,RANK,ENDPOINT[,REPLAY]", action="append", default=[])
    parser.add_argument("--silence-deadline-s", type=float, default=SILENCE_DEADLINE_S)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a request takes three, and 1024 are usual
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
