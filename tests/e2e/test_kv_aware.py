"""`vllm-router`'s policy `kv_aware` before two real vLLM servers: a prompt goes to the one whose pool has its pages.

vLLM's own prefix cache is off, so that the connector's events are all that the router hears of. tests/vllm has the same
with a scheduler for the servers.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from long_form import LONG

from e2e.client import HttpClient
from e2e.index import Endpoints, Indexed
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.process import ENVIRONMENTS, assert_no_complaints, free_port, pool_folder, running
from e2e.questions import draw_tokens
from e2e.server import ONE_CORE, Server

ROUTER = ENVIRONMENTS / "routers" / "bin" / "vllm-router"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not LONG, reason="a pair of servers of its own (`make test-long`)"),
    pytest.mark.skipif(not ROUTER.exists(), reason="NOT TESTED: vllm-router could not be installed (`make routers`)"),
]
PROMPT_PAGES = 4
ARGS = ("--max-model-len", "2048", "--no-enable-prefix-caching", "--block-size", str(PAGE_TOKENS))


class Routed(HttpClient):
    """A client of the router; each server has a pool of its own."""

    def __init__(self, stack: ExitStack, model: Path, logs: Path) -> None:
        port, endpoints = free_port(), [Endpoints(), Endpoints()]
        super().__init__("127.0.0.1", port)
        self._model = model.name
        self.pools = [stack.enter_context(pool_folder()) for _ in endpoints]
        self.servers = []
        for number, (pool, of) in enumerate(zip(self.pools, endpoints, strict=True)):
            args = (*ARGS, "--kv-events-config", of.config(enable_kv_cache_events=True))
            server = Server(model, log=logs / f"kv-aware-{number}.log", pool=pool, args=args, env=ONE_CORE)
            self.servers.append(stack.enter_context(running(server)))
        command = [
            ROUTER, "--host", "127.0.0.1", "--port", port, "--prometheus-port", free_port(), "--policy", "kv_aware",
            "--worker-urls", *(server.url for server in self.servers), "--kv-event-block-size", PAGE_TOKENS,
            "--kv-event-model", model.name,
        ]  # fmt: skip
        for server, of in zip(self.servers, endpoints, strict=True):
            command += ["--kv-event-source", f"{server.url}={of.events}"]
            command += ["--kv-event-replay-source", f"{server.url}={of.replay}"]
        self.heard = [Indexed(of, engine="vLLM") for of in endpoints]
        for one in self.heard:
            stack.callback(one.close)
        log = logs / "kv-aware-router.log"
        with log.open("wb") as out:
            process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=subprocess.STDOUT)
        stack.callback(process.wait)
        stack.callback(process.kill)

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return log.read_text().count("kv_index subscriber for") == 2

        wait_for(is_ready, "the router's subscriptions")

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Of a prompt, where it was sent to. A request that wants token ids (`return_token_ids`) goes by load alone."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1}
        usage = json.loads(self._read(self._send("POST", "/v1/completions", body)))["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


@pytest.fixture
def routed(qwen3: Path, logs: Path) -> Iterator[Routed]:
    with ExitStack() as stack:
        found = Routed(stack, qwen3, logs)
        yield found
    assert_no_complaints(found.servers)


def test_a_prompt_goes_to_the_server_whose_pool_has_its_pages(routed: Routed, qwen3: Path) -> None:
    """It is found there: the other's pool does not have it, and no prompt is sent through the router before."""
    draw = random.Random(18)

    def computed_at(number: int) -> tuple[int, ...]:
        """A prompt of which the pool of a server has the pages, and everybody was told so."""
        server, heard = routed.servers[number], routed.heard[number]
        prompt = draw_tokens(draw, PROMPT_PAGES * PAGE_TOKENS + 9)
        server.ask(prompt, max_tokens=1)
        Pages(routed.pools[number], qwen3, lambda: server).wait_for(prompt)

        def is_said() -> bool:
            server.ask(prompt[:8], max_tokens=1)  # events go out with a step
            return heard.of(prompt, "CPU") == PROMPT_PAGES * PAGE_TOKENS

        wait_for(is_said, "events of the prompt's pages")
        return prompt

    def hits(prompt: tuple[int, ...], ending: int) -> bool:
        return routed.cached_tokens([*prompt, ending]) == PROMPT_PAGES * PAGE_TOKENS

    for number in (0, 1):  # a router that begins to listen may miss the first
        wait_for(lambda number=number: hits(computed_at(number), 0), "a prompt sent where its pages are")
    prompts = [computed_at(number) for number in (0, 1, 1, 0)]
    assert [hits(prompt, ending) for ending in range(3) for prompt in prompts] == [True] * 12
