"""`make bench NAME=hybrid`: time to first token of the four hybrid models, computed and from the pool.

Two servers for each model, vLLM alone and with the connector. In each round both are asked a prompt that is new to
them; then vLLM alone has it in its own prefix cache, while the other one's is emptied and the pool has it. Before a new
prompt is asked the server with the connector is at rest: else what it still stores slows vLLM alone.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench.peers.report import Comparison, Row, row
from bench.peers.routing import counted
from bench.peers.vllm import Engine, median_ms, version
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import RequestFailed
from mooncake_connector.cli.bench.serve.client import Server, completion
from mooncake_connector.cli.bench.serve.engines import MODEL_NAME, read_shape, transfer_config, vllm_command
from mooncake_connector.metrics.registry import PREFIX

MODELS = {"gemma3": "float32", "gpt-oss": "float32", "qwen3-next": "bfloat16", "cohere2": "float32"}
"""And what each computes in. vLLM's kernels of the delta rule know nothing but bfloat16 on the CPU."""
NEW, NEW_ALONE, HIT, OWN_HIT = "new", "new, alone", "hit", "own hit"
_START_DEADLINE_S = 900.0
_LIMIT_S = 600.0
_SAVED_S, _PAUSE_S = 60.0, 0.5
_SAVES = f"{PREFIX}saves_total"
_REST_S = 1.5
"""A server that ends no save for so long has none under way, or hears of them no more: it stops stepping after 1 s."""


@dataclass(frozen=True)
class Scale:
    """`hit_tokens` is the multiple of all blocks (128 and 256 tokens) before the prompt's end."""

    prompt_tokens: int = 1856
    hit_tokens: int = 1792
    rounds: int = 15


QUICK = Scale(prompt_tokens=320, hit_tokens=256, rounds=1)


def run(engine: Engine, folder: Path, scale: Scale, progress: Progress) -> Comparison:
    """`engine.model` is the folder that has the models. Raises BenchError where a server fails or there is no hit."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    versions["vllm"] = version(engine)
    found = {}
    for name, dtype in MODELS.items():
        model = Engine(engine.python, engine.model / name)
        progress(f"{name}: starting vLLM alone and with the connector")
        with servers(model, dtype, folder, scale) as (alone, ours):
            vocabulary = read_shape(model.model).vocabulary
            found[name] = measure(alone, ours, vocabulary, scale, name, progress)
    return Comparison(machine, versions, rows(found, scale))


def rows(found: Mapping[str, Mapping[str, Sequence[float]]], scale: Scale) -> list[Row]:
    """Medians. Both limits are of vLLM alone: the same prompt computed, and found in its own prefix cache."""
    made = []
    for name, seconds in found.items():
        what = f"{name}, {scale.prompt_tokens:,} tokens: time to first token"
        made += [
            row(f"{what}, new prompt", median_ms(seconds, NEW), "ms", limit=median_ms(seconds, NEW_ALONE)),
            row(
                f"{what}, {scale.hit_tokens:,} of them from the pool",
                median_ms(seconds, HIT),
                "ms",
                limit=median_ms(seconds, OWN_HIT),
            ),
        ]
    return made


def measure(
    alone: Server, ours: Server, vocabulary: int, scale: Scale, name: str, progress: Progress
) -> dict[str, list[float]]:
    """Seconds to the first token. The first round warms up and does not count."""
    draw = random.Random(name)
    seconds: dict[str, list[float]] = {}
    for number in range(scale.rounds + 1):
        progress(f"{name}: round {number} of {scale.rounds}" if number else f"{name}: warming up")
        prompt = draw.choices(range(vocabulary), k=scale.prompt_tokens)
        taken = {}
        for is_ours in (False, True) if number % 2 else (True, False):  # who is asked first finds cold caches
            rest(ours)
            if is_ours:
                taken |= {NEW: ask(ours, prompt), HIT: from_pool(ours, prompt, scale)}
            else:
                taken |= {NEW_ALONE: ask(alone, prompt), OWN_HIT: ask(alone, prompt)}
        if number:
            for way, one_s in taken.items():
                seconds.setdefault(way, []).append(one_s)
    return seconds


def ask(server: Server, prompt: list[int]) -> float:
    """Seconds to the first token of an answer of two. Raises BenchError."""
    try:
        body = {**completion(MODEL_NAME, prompt, 2), "ignore_eos": True, "return_token_ids": True}
        return server.stream(body, _LIMIT_S).first_token_s
    except RequestFailed as error:
        raise BenchError(f"{server.url} did not answer: {error}") from error


def from_pool(server: Server, prompt: list[int], scale: Scale) -> float:
    """The same for a prompt of which the server's own cache has nothing; asked again until the pool has all of it."""
    until_s = time.monotonic() + _SAVED_S
    while True:
        forget(server)
        before = counted(server)
        taken_s = ask(server, prompt)
        loaded = counted(server).minus(before).connector
        if loaded == scale.hit_tokens:
            return taken_s
        if time.monotonic() > until_s:
            raise BenchError(f"{loaded} tokens came from the pool instead of {scale.hit_tokens}")
        time.sleep(_PAUSE_S)


def rest(server: Server) -> None:
    """Wait until it stores nothing any more. Raises BenchError."""
    until_s, since_s, saves = time.monotonic() + _SAVED_S, time.monotonic(), ended_saves(server)
    while time.monotonic() - since_s < _REST_S:
        time.sleep(_REST_S / 10)
        now = ended_saves(server)
        if now != saves:
            since_s, saves = time.monotonic(), now
        if time.monotonic() > until_s:
            raise BenchError(f"{server.url} stores without end")


def ended_saves(server: Server) -> float:
    """How many saves have ended there. Raises BenchError."""
    try:
        _, _, content = server.get("/metrics", _LIMIT_S)
    except RequestFailed as error:
        raise BenchError(f"{server.url} did not answer: {error}") from error
    families = text_string_to_metric_families(content.decode())
    return sum(sample.value for family in families for sample in family.samples if sample.name == _SAVES)


def forget(server: Server) -> None:
    """Empty its own cache. Raises BenchError."""
    try:
        status = server.call("POST", "/reset_prefix_cache", {}, _LIMIT_S, lambda reply: reply.status)
    except RequestFailed as error:
        raise BenchError(f"{server.url} did not answer: {error}") from error
    if status != 200:
        raise BenchError(f"{server.url}/reset_prefix_cache answered {status}")


@contextlib.contextmanager
def servers(engine: Engine, dtype: str, folder: Path, scale: Scale) -> Iterator[tuple[Server, Server]]:
    """vLLM alone, and with the connector and a pool of its own."""
    with contextlib.ExitStack() as stack:
        pool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=folder))) / "pool"
        ours = transfer_config("MooncakeKVConnector", {"pool": str(pool), "capacity": "512MiB"})
        started = []
        for port, transfer in zip(processes.free_ports(2), (None, ours), strict=True):
            log = stack.enter_context(tempfile.TemporaryFile())
            command = _command(engine, dtype, port, transfer, scale)
            process = stack.enter_context(processes.running(command, log, _ENV, grace_s=0, leave_s=20.0))
            started.append((Server("127.0.0.1", port), process, log))
        for server, process, log in started:
            processes.wait_until(server.is_healthy, process, log, _START_DEADLINE_S, server.url)
        (alone, _, _), (with_pool, _, _) = started
        yield alone, with_pool


_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # to empty the engine's own cache
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "PASSIVE",  # who waits for its turn takes no core
}


def _command(engine: Engine, dtype: str, port: int, transfer: dict[str, Any] | None, scale: Scale) -> list[str]:
    longest = str(scale.prompt_tokens + 64)
    fixed = ("--dtype", dtype, "--max-model-len", longest, "--enforce-eager", "--no-disable-hybrid-kv-cache-manager")
    return [*vllm_command(engine.python, engine.model, port, transfer), *fixed, "--enable-prefix-caching"]
