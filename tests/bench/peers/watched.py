"""`make bench NAME=watched`: what it costs a real vLLM server that somebody looks at it.

One server with our pool answers one prompt after the other, of which a part is new and saved. Windows take turns:
nobody looks, `top` follows server and pool, or /metrics is read every second, as Prometheus would. What counts is the
processor time of the server's processes, for a request and while nothing is asked, which the watcher's own share of the
machine is not part of.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.report import Comparison, Row, row
from bench.peers.spread import Spread
from bench.peers.vllm import OURS, SERVER_ENV, Engine, version
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import RequestFailed
from mooncake_connector.cli.bench.serve.client import Server, completion
from mooncake_connector.cli.bench.serve.engines import MODEL_NAME, read_shape, transfer_config, vllm_command

NOBODY, TOP, METRICS = "nobody looks", "`top --url`", "/metrics every second"
_START_S, _LIMIT_S = 600.0, 120.0
_SCRAPE_S = 1.0


@dataclass(frozen=True)
class Scale:
    """All prompts begin with the same `shared_tokens`; `requests` are asked in a window."""

    rounds: int = 8
    requests: int = 25
    idle_s: float = 6.0
    shared_tokens: int = 256
    own_tokens: int = 128
    answer_tokens: int = 8


QUICK = Scale(rounds=1, requests=3, idle_s=0.1)


@dataclass
class Found:
    """Of the windows of one kind: seconds of a processor for a request, and in a second in which nothing is asked, one
    figure a window each; times to first token."""

    cpu_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)


def run(engine: Engine, folder: Path, scale: Scale, progress: Progress) -> Comparison:
    """Raises BenchError where the server does not start, or a request fails."""
    machine, versions = describe_machine(folder), describe_versions()
    versions["vllm"] = version(engine)
    found = defaultdict[str, Found](Found)
    draw, vocabulary = random.Random(18), read_shape(engine.model).vocabulary
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=folder) as name:
        pool = Path(name) / "pool"
        with _server(engine, pool, scale, progress) as (server, pid):
            watchers = {NOBODY: contextlib.nullcontext, TOP: lambda: _top(server, pool), METRICS: lambda: _read(server)}
            shared = draw.choices(range(vocabulary), k=scale.shared_tokens)
            for number in range(scale.rounds + 1):
                progress(f"round {number} of {scale.rounds}")
                for watcher in draw.sample(list(watchers), len(watchers)):
                    own = (draw.choices(range(vocabulary), k=scale.own_tokens) for _ in range(scale.requests))
                    into = found[watcher] if number else Found()  # the first one warms up
                    _window(server, pid, watchers[watcher], [[*shared, *one] for one in own], scale, into)
    return Comparison(machine, versions, rows(found))


def rows(found: Mapping[str, Found]) -> list[Row]:
    """The limit of each figure is that of the windows in which nobody looks; changes are those within a round."""
    made, alone = [], found[NOBODY]
    for name, of in found.items():
        made += [
            row(f"{name}: processor time of the server, a request", statistics.median(of.cpu_s) * 1e3, "ms",
                limit=statistics.median(alone.cpu_s) * 1e3),
            row(f"{name}: processor time of the idle server, a second", statistics.mean(of.idle_s) * 1e3, "ms",
                limit=statistics.mean(alone.idle_s) * 1e3),
            row(f"{name}: time to first token, p50", statistics.median(of.ttfts_s) * 1e3, "ms",
                limit=statistics.median(alone.ttfts_s) * 1e3),
        ]  # fmt: skip
        if of is not alone:
            changes = [100 * (one / other - 1) for one, other in zip(of.cpu_s, alone.cpu_s, strict=True)]
            change = Spread.of(changes, [], statistics.median)
            made += [
                row(f"{name}: processor time, change by it, median of rounds", change.value, "%"),
                row(f"{name}: where 95 of 100 resampled medians lie, from", change.low, "%"),
                row(f"{name}: where 95 of 100 resampled medians lie, to", change.high, "%"),
            ]
    return made


def _window(
    server: Server, pid: int, watcher: Callable[[], contextlib.AbstractContextManager[object]],
    prompts: list[list[int]], scale: Scale, into: Found,
) -> None:  # fmt: skip
    with watcher():
        before = processor_s(pid)
        for prompt in prompts:
            try:
                answer = server.stream(
                    {**completion(MODEL_NAME, prompt, scale.answer_tokens), "ignore_eos": True}, _LIMIT_S
                )
            except RequestFailed as error:
                raise BenchError(f"{server.url} did not answer: {error}") from error
            into.ttfts_s.append(answer.first_token_s)
        asked = processor_s(pid)
        into.cpu_s.append((asked - before) / len(prompts))
        time.sleep(scale.idle_s)
        into.idle_s.append((processor_s(pid) - asked) / scale.idle_s)


def processor_s(leader: int) -> float:
    """Of all processes of a session, so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _server(engine: Engine, pool: Path, scale: Scale, progress: Progress) -> Iterator[tuple[Server, int]]:
    progress("starting vLLM")
    (port,) = processes.free_ports(1)
    transfer = transfer_config(OURS, {"pool": str(pool), "capacity": 512 << 20})
    longest = scale.shared_tokens + scale.own_tokens + scale.answer_tokens
    command = [
        *vllm_command(engine.python, engine.model, port, transfer), "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(longest),
    ]  # fmt: skip
    env, server = SERVER_ENV, Server("127.0.0.1", port)
    with tempfile.TemporaryFile() as log, processes.running(command, log, env, grace_s=0, leave_s=20.0) as process:
        processes.wait_until(server.is_healthy, process, log, _START_S, server.url)
        yield server, process.pid


@contextlib.contextmanager
def _top(server: Server, pool: Path) -> Iterator[None]:
    """It has a session of its own. What it prints before it ends says that it looked."""
    command = [sys.executable, "-m", "mooncake_connector.cli.entry", "top", "--url", server.url, "--pool", str(pool)]
    with tempfile.TemporaryFile() as log, processes.running(command, log, grace_s=0) as process:
        processes.wait_until(lambda: os.fstat(log.fileno()).st_size > 0, process, log, 60.0, "top")
        yield


@contextlib.contextmanager
def _read(server: Server) -> Iterator[None]:
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            began_s = time.monotonic()
            server.get("/metrics")
            over.wait(max(0.0, _SCRAPE_S - (time.monotonic() - began_s)))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
