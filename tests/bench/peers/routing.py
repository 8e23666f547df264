"""`make bench NAME=routing`: the builtin router's policies before three real vLLM servers, with conversations.

Each server has a prefix cache of its own and nothing else. A few conversations go on at the same time; each turn sends
all turns before it again, and begins when the one before has ended. The policies take turns, with prompts of their own,
and every cache is emptied in between. "index" is an agent that hears of the caches by the servers' KV events.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.report import Comparison, Row, row
from bench.peers.vllm import SERVER_ENV, Engine, version
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import default_folder, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import RequestFailed
from mooncake_connector.cli.bench.serve.client import Server, completion
from mooncake_connector.cli.bench.serve.engines import MODEL_NAME, read_shape, vllm_command
from mooncake_connector.cli.bench.serve.load import CacheTokens, cache_tokens

_BLOCK_TOKENS = 128
POLICIES = {
    "round-robin": ("round-robin",), "least-loaded": ("least-loaded",), "conductor, history": ("conductor",),
    "conductor, index": ("conductor", "--index-deadline-s", "5", "--index-block-tokens", str(_BLOCK_TOKENS)),
}  # fmt: skip
_START_DEADLINE_S = 900.0
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Scale:
    """What is asked. Conversations share `shared_tokens` in groups of four."""

    instances: int = 3
    conversations: int = 18
    turns: int = 4
    at_once: int = 6
    shared_tokens: int = 256
    turn_tokens: int = 320
    answer_tokens: int = 8
    blocks: int = 60
    """Of each instance's cache."""
    rounds: int = 2

    @property
    def longest(self) -> int:
        return self.shared_tokens + self.turns * self.turn_tokens + self.answer_tokens


QUICK = Scale(conversations=4, turns=2, at_once=2, rounds=1)


@dataclass
class Found:
    """Of one policy, over all of its rounds."""

    ttfts_s: list[float] = field(default_factory=list)
    tokens: list[list[CacheTokens]] = field(default_factory=list)
    """By round and instance."""

    def hit_rate(self) -> float:
        every = [one for of in self.tokens for one in of]
        hits, computed = sum(one.engine_cache for one in every), sum(one.computed for one in every)
        return 100.0 * hits / max(1, hits + computed)

    def busiest(self) -> float:
        """The mean over rounds."""
        computed = [[one.computed for one in of] for of in self.tokens]
        return statistics.mean(max(of) * len(of) / max(1, sum(of)) for of in computed)


def run(engine: Engine, scale: Scale, progress: Progress) -> Comparison:
    """Raises BenchError where a server does not start, or a request fails."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    versions["vllm"] = version(engine)
    found = {policy: Found() for policy in POLICIES}
    vocabulary = read_shape(engine.model).vocabulary
    with servers(engine, scale, progress) as (instances, index):
        for number in range(scale.rounds):
            for policy in POLICIES:
                progress(f"{policy}, round {number + 1} of {scale.rounds}")
                with router(policy, instances, index, engine.python) as front:
                    measure(front, instances, scale, vocabulary, f"{policy} {number}", found[policy])
                    if "index" in policy:
                        progress(_answered(front))
    return Comparison(machine, versions, rows(found, scale))


def rows(found: dict[str, Found], scale: Scale) -> list[Row]:
    work = f"{scale.instances} vLLM, {scale.conversations} conversations of {scale.turns} turns"
    made = []
    for policy, of in found.items():
        cuts = statistics.quantiles(of.ttfts_s, n=100, method="inclusive")
        made += [
            row(f"{work}, {policy}: prompt tokens from a cache", of.hit_rate(), "%"),
            row(f"{work}, {policy}: time to first token, p50", cuts[49], "s"),
            row(f"{work}, {policy}: time to first token, p99", cuts[98], "s"),
            row(f"{work}, {policy}: tokens computed by the busiest, over the mean", of.busiest(), ""),
        ]
    return made


def measure(front: Server, instances: list[Server], scale: Scale, vocabulary: int, seed: str, into: Found) -> None:
    """All conversations once, through the router."""
    for one in instances:
        status = one.call("POST", "/reset_prefix_cache", {}, _LIMIT_S, lambda reply: reply.status)
        if status != 200:
            raise BenchError(f"{one.url}/reset_prefix_cache answered {status}")
    before = [counted(one) for one in instances]
    draw, lock = random.Random(seed), threading.Lock()
    shared = [draw.choices(range(vocabulary), k=scale.shared_tokens) for _ in range(-(-scale.conversations // 4))]
    seeds = [draw.random() for _ in range(scale.conversations)]

    def talk(number: int) -> None:
        own, prompt = random.Random(seeds[number]), list(shared[number // 4])
        for _ in range(scale.turns):
            prompt += own.choices(range(vocabulary), k=scale.turn_tokens)
            body = {**completion(MODEL_NAME, prompt, scale.answer_tokens), "ignore_eos": True}
            try:
                answer = front.stream(body, _LIMIT_S)
            except RequestFailed as error:
                raise BenchError(f"{front.url} did not answer: {error}") from error
            with lock:
                into.ttfts_s.append(answer.first_token_s)

    with ThreadPoolExecutor(scale.at_once) as pool:
        list(pool.map(talk, range(scale.conversations)))
    into.tokens.append([counted(one).minus(old) for one, old in zip(instances, before, strict=True)])


def _answered(front: Server) -> str:
    """What became of asking the index, in the router's words."""
    lines = front.get("/metrics")[2].decode().splitlines()
    return "; ".join(line for line in lines if line.startswith("mooncake_connector_router_index_questions_total"))


def counted(server: Server) -> CacheTokens:
    found = cache_tokens(server)
    if found is None:
        raise BenchError(f"{server.url}/metrics has no counters of prompt tokens")
    return found


@contextlib.contextmanager
def servers(engine: Engine, scale: Scale, progress: Progress) -> Iterator[tuple[list[Server], Server]]:
    """The instances, and the index that knows of them."""
    env = {**SERVER_ENV, "VLLM_SERVER_DEV_MODE": "1"}  # to empty the caches
    progress(f"starting {scale.instances} servers")
    with contextlib.ExitStack() as stack:
        started, endpoints = [], []
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for port in processes.free_ports(scale.instances):
            log = stack.enter_context(tempfile.TemporaryFile())
            endpoints.append({name: f"ipc://{folder}/{port}.{name}" for name in ("endpoint", "replay_endpoint")})
            events = {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints[-1]}
            command = [
                *vllm_command(engine.python, engine.model, port, None), "--dtype", "float32", "--enforce-eager",
                "--max-model-len", str(scale.longest), "--block-size", str(_BLOCK_TOKENS),
                "--num-gpu-blocks-override", str(scale.blocks), "--kv-events-config", json.dumps(events),
            ]  # fmt: skip
            process = stack.enter_context(processes.running(command, log, env, grace_s=0, leave_s=20.0))
            started.append((Server("127.0.0.1", port), process, log))
        for server, process, log in started:
            processes.wait_until(server.is_healthy, process, log, _START_DEADLINE_S, server.url)
        instances = [server for server, _, _ in started]
        yield instances, stack.enter_context(_index(dict(zip(instances, endpoints, strict=True)), engine.python))


@contextlib.contextmanager
def _index(instances: Mapping[Server, dict[str, str]], python: Path) -> Iterator[Server]:
    """An agent with a pool that nobody uses, which follows the events of all of them."""
    (port,) = processes.free_ports(1)
    env = {"MOONCAKE_CONNECTOR_AGENT_HTTP_PORT": str(port), "MOONCAKE_CONNECTOR_CAPACITY": "64MiB"}
    with tempfile.TemporaryDirectory(dir=default_folder()) as folder, tempfile.TemporaryFile() as log:
        command = [str(python), "-m", "mooncake_connector.cli.entry", "agent", "--foreground"]
        command += ["--pool", str(Path(folder) / "pool")]
        with processes.running(command, log, env, grace_s=0, leave_s=20.0) as process:
            index = Server("127.0.0.1", port)
            processes.wait_until(index.is_healthy, process, log, 60.0, "the index")
            for one, endpoints in instances.items():
                fields = {"instance_id": one.url, "type": "vLLM", "modelname": MODEL_NAME, "pool": False}
                asked = {**fields, "block_size": _BLOCK_TOKENS, **endpoints}
                status = index.call("POST", "/register", asked, _LIMIT_S, lambda reply: reply.status)
                if status != 200:
                    raise BenchError(f"{index.url}/register answered {status}")
            yield index
            if "stored_blocks" not in index.get("/metrics")[2].decode():
                raise BenchError(f"{index.url} heard of no block")


@contextlib.contextmanager
def router(policy: str, instances: list[Server], index: Server, python: Path) -> Iterator[Server]:
    (port,) = processes.free_ports(1)
    command = [str(python), "-m", "mooncake_connector.deploy.proxy", "--engine", "vllm", "--port", str(port)]
    command += ["--policy", *POLICIES[policy], *(word for one in instances for word in ("--decode", one.url))]
    if "index" in policy:
        command += ["--index", index.url]
    with tempfile.TemporaryFile() as log, processes.running(command, log, grace_s=0) as process:
        front = Server("127.0.0.1", port)
        processes.wait_until(front.is_healthy, process, log, 60.0, "the router")
        yield front
