"""Real engines to which everything happens that the dashboard shows, and a real Prometheus that reads them."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dashboards.prometheus import Prometheus, prometheus
from long_form import LONG

from e2e.hosts import Agent
from e2e.pages import PAGE_TOKENS, clear, wait_for
from e2e.pd.instances import Instance
from e2e.process import ENVIRONMENTS, free_port, pool_folder
from e2e.questions import draw_tokens
from e2e.server import Server
from e2e.sglang_server import ONE_CORE, SGLangServer

__all__ = ["HAS_SGLANG", "Seen", "monitored"]

HAS_SGLANG = LONG and (ENVIRONMENTS / "sglang" / "bin" / "python").exists()
CAPACITY = "24MiB"
"""24 pages of the checkpoint: prompts push each other out."""
PROMPT_TOKENS = 5 * PAGE_TOKENS + 40
"""What is no full page the pool does not have, so a transfer brings it."""
FORGOTTEN = 8
"""So many prompts later the pool has evicted one."""
CLEARED = 10
"""After so many rounds the pool is cleared."""
ROUND_S = 300.0
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True, slots=True)
class Seen:
    """What Prometheus has read since `start_s`, seconds since the epoch, while the load goes on."""

    prometheus: Prometheus
    pool: Path
    urls: list[str]
    """Of the engines."""
    start_s: float
    loading: Future[None]

    def check(self) -> None:
        """Raises what ended the load."""
        if self.loading.done():
            self.loading.result()


@contextmanager
def monitored(model: Path, logs: Path, folder: Path) -> Iterator[Seen]:
    """Two vLLM instances (in the long form one of SGLang too) on a pool with two tiers, of which one cannot be used."""
    with ExitStack() as stack:
        pool = stack.enter_context(pool_folder())
        port = free_port()
        env = {"MOONCAKE_CONNECTOR_CAPACITY": CAPACITY, "MOONCAKE_CONNECTOR_AGENT_METRICS_PORT": str(port)}
        agent = Agent(pool, logs / "monitored-agent.log", env)
        stack.callback(agent.stop)
        agent.start(
            {"kind": "disk", "path": str(folder / "disk"), "capacity": "1GiB", "write": "reused"},
            {"kind": "disk", "name": "unusable", "path": "/dev/null/disk", "capacity": "1GiB"},
        )
        config = {"prefix_reuse": True, "capacity": CAPACITY, "tiers": ["mooncake"], "agent": "external"}
        prefill, decode = (
            Instance(
                model, log=logs / f"monitored-{number}.log", pool=pool, config=config,
                args=["--max-model-len", "2048", "--max-num-seqs", "2"],
            )
            for number in range(2)
        )  # fmt: skip
        servers: list[Server | SGLangServer] = [prefill, decode]
        if HAS_SGLANG:
            engine = {"MOONCAKE_CONNECTOR_TIERS": "mooncake", "MOONCAKE_CONNECTOR_AGENT": "external"}
            log = logs / "monitored-sglang.log"
            servers.append(SGLangServer(model, log=log, pool=pool, env=ONE_CORE | env | engine))
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_until_ready()
        targets = {
            "engines": [server.url.removeprefix("http://") for server in servers],
            "mooncake-connector-agents": [f"127.0.0.1:{port}"],
        }
        (folder / "monitoring").mkdir()
        watcher = stack.enter_context(prometheus(folder / "monitoring", free_port(), targets))
        wait_for(lambda: all(one["health"] == "up" for one in watcher.targets()), "every target is read")
        threads, stop = stack.enter_context(ThreadPoolExecutor(1)), threading.Event()
        loading = threads.submit(load, prefill, decode, servers[2:], pool, stop)
        try:
            yield Seen(watcher, pool, [server.url for server in servers], time.time(), loading)
        finally:
            stop.set()
        loading.result(ROUND_S)


def load(
    prefill: Instance, decode: Instance, others: list[Server | SGLangServer], pool: Path, stop: threading.Event
) -> None:
    """Prompts that are new to each, that the own cache has, the pool, or a tier, and that one instance computes for
    another."""
    source, asked = random.Random(18), list[tuple[int, ...]]()
    for number in itertools.count():
        if stop.is_set():
            return
        prompt, other = (draw_tokens(source, PROMPT_TOKENS) for _ in range(2))
        asked += [prompt, other]
        for _ in range(2):  # the second time from its own cache
            prefill.ask(prompt, max_tokens=2)
        for server in (decode, *others):  # from the pool
            server.ask(prompt, max_tokens=2)
        for server in others:
            new = draw_tokens(source, PROMPT_TOKENS)
            for _ in range(2):
                server.ask(new, max_tokens=2)
        params = prefill.post(prefill.body(other, 1, kv_transfer_params=HAND_OVER))["kv_transfer_params"]
        decode.post(decode.body(other, 2, kv_transfer_params=params))
        decode.reset_prefix_cache()
        while len(asked) > FORGOTTEN:  # evicted since: the first of a round is in a tier, as it was asked for again
            forgotten = asked.pop(0)
            for server in (decode, *others):
                server.ask(forgotten, max_tokens=2)
        if number % 2:
            damage(pool)
            decode.ask(prompt, max_tokens=2)
        if number % CLEARED == CLEARED - 1:
            clear(pool)


def damage(pool: Path) -> None:
    """A bit in every page of the pool; whoever reads one notices."""
    for arena in pool.glob("*/arena"):
        with open(arena, "r+b", buffering=0) as file:
            for at in range(1000, arena.stat().st_size, 4096):
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1]))
