"""What tiers cost vLLM with prompts that nobody has: the scheduler's step, and the time to first token of a server.

Beside a pool without tiers there are pools with an agent of their own, and with a cluster that answers, with a master
that takes connections and never says a word, with one that stopped answering after the agent had reached it, and
with an agent that is stopped. All are asked in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from bench.peers.report import Goal, Row, row
from bench.peers.spread import Spread
from bench.peers.vllm import OURS, SERVER_ENV, Engine, run_child
from bench.tiers import mooncake
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import RequestFailed
from mooncake_connector.cli.bench.serve.client import Server, completion
from mooncake_connector.cli.bench.serve.engines import MODEL_NAME, transfer_config, vllm_command
from mooncake_connector.config.sources import load_config
from store_client.agent.visit import ask_report
from store_client.open import open_store
from store_client.testing import SHARD, chain, namespace

NONE, ANSWERS, SILENT, STALLED, STOPPED = "none", "answers", "silent", "stalled", "stopped"
TITLES = {
    ANSWERS: "a cluster that has nothing",
    SILENT: "a tier that never answers",
    STALLED: "a tier that stopped answering",
    STOPPED: "an agent that is stopped",
}
_START_S = 120.0
_SERVERS_S = 600.0
_ANSWER_S = 120.0
_CAPACITY_NBYTES = 512 << 20
_PAGE_TOKENS = 64
_SHORTEST_PAGES, _LONGEST_PAGES = 2, 4
_STEP_TOKENS = 200
_STEP_REQUESTS = 64
_LATE = 3
"""Prompts that come while a server answers another one."""
_ARGUMENTS = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager")
_WARM_UP = 6


@dataclass(frozen=True)
class Scale:
    """Rounds, in each of which every engine has a turn."""

    step_rounds: int = 40
    ttft_rounds: int = 400


QUICK = Scale(step_rounds=1, ttft_rounds=2)


def measure(engine: Engine, folder: Path, scale: Scale, progress: Progress) -> list[Row]:
    """All rows. Raises BenchError."""
    names = (NONE, *TITLES)
    with pools(folder, names) as transfers:
        progress(f"vLLM: scheduler steps without tiers, and with: {', '.join(TITLES.values())}")
        order = {
            "engines": transfers, "num_requests": _STEP_REQUESTS, "prompt_tokens": _STEP_TOKENS,
            "rounds": scale.step_rounds, "plain": NONE,
        }  # fmt: skip
        found = run_child(engine, "vllm_arrivals", order, {}, progress)
    rows = step_rows(found, progress)
    with pools(folder, (NONE, ANSWERS, SILENT, STALLED)) as transfers:
        return rows + ttft_rows(first_tokens(engine, transfers, scale.ttft_rounds, progress), progress)


@contextlib.contextmanager
def pools(folder: Path, names: Sequence[str]) -> Iterator[dict[str, dict[str, Any]]]:
    """The transfer configuration of an engine beside each of `names`, with a pool of its own."""
    with ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=folder)))
        transfers, to_stop = dict[str, dict[str, Any]](), list[int]()
        for name in names:
            pool: dict[str, Any] = {"pool": str(where / name), "capacity": _CAPACITY_NBYTES}
            if name in (ANSWERS, STALLED):
                master, master_pid = stack.enter_context(mooncake.cluster(_CAPACITY_NBYTES))
            elif name != NONE:
                master, master_pid = stack.enter_context(_silent_master()), 0
            if name != NONE:
                pool["tiers"] = [{"kind": "mooncake", "master": master, "host": "127.0.0.1"}]
                pool["agent"] = "external"
                agent_pid = stack.enter_context(_agent(pool, bool(master_pid)))
                to_stop += {STALLED: [master_pid], STOPPED: [agent_pid]}.get(name, [])
            transfers[name] = transfer_config(OURS, pool)
        for pid in to_stop:
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        yield transfers


@contextlib.contextmanager
def _agent(pool: Mapping[str, Any], reaches: bool) -> Iterator[int]:
    """The agent of a pool, its process's number, once it listens; where `reaches`, once its tier has answered it."""
    with tempfile.TemporaryFile() as log:
        settings = {"POOL": pool["pool"], "CAPACITY": str(pool["capacity"]), "TIERS": json.dumps(pool["tiers"])}
        env = {**os.environ, **{f"MOONCAKE_CONNECTOR_{name}": value for name, value in settings.items()}}
        # Of this interpreter, which has Mooncake's wheel; the engine's need not.
        command = [sys.executable, "-m", "mooncake_connector.cli.entry", "agent", "--foreground"]
        with processes.running(command, log, env) as process:
            folder = Path(pool["pool"])
            processes.wait_until((folder / "agent.sock").exists, process, log, _START_S, "the agent")
            if reaches:
                config = load_config(dict(pool), {})
                with open_store(config) as store:
                    space = store.space(namespace("bench"), SHARD, 1 << 20)

                    def answered() -> bool:
                        space.prefetch(chain(os.urandom(8).hex(), 1))
                        return any(tier["asked_pages"] for tier in (ask_report(folder) or {}).get("tiers", ()))

                    processes.wait_until(answered, process, log, _START_S, "a question to the cluster")
            yield process.pid


@contextlib.contextmanager
def _silent_master() -> Iterator[str]:
    """The address of what takes connections and says nothing."""
    held: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                held.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in held:
                one.close()


def step_rows(found: Mapping[str, Mapping[str, list[float]]], progress: Progress) -> list[Row]:
    """Medians of the ratios of the rounds, and differences of percentiles; what was not measured is None.

    The time on the clock of a step of a millisecond says little of 1 % on a machine with other work: its CPU time does.
    """
    rows = []
    plain = found.get(NONE, {})
    for name, title in TITLES.items():
        ours = found.get(name, {})
        for what, mine, theirs, goal in (
            ("CPU time of the scheduler's steps", "cpu_s", ours.get("plain_cpu_s", ()), Goal(at_most=1)),
            ("scheduler step with arrivals", "step_s", plain.get("step_s", ()), None),
        ):
            text = f"vLLM, {what}, change by {title}"
            ratios = [100 * (a / b - 1) for a, b in zip(ours.get(mine, ()), theirs, strict=False)]
            change = Spread.of(ratios, [], statistics.median) if ratios else None
            progress(f"{text}: {change} %")
            rows.append(row(text, change and change.value, "%", goal=goal))
        for figure, where in (("idle_s", "idle"), ("busy_s", "busy")):
            rows += _added(f"vLLM's scheduler, {where}: planned later", title, ours, plain, figure, progress)
    if pauses := [1e3 * one for name in (NONE, *TITLES) for one in found.get(name, {}).get("pause_s", ())]:
        spread = Spread.of(pauses, [], lambda some: percentile(some, 99))
        progress(f"vLLM's pause of 1 ms, which a request waits for when it is put aside, p99: {spread} ms")
    return rows


def ttft_rows(found: Mapping[str, Mapping[str, list[float]]], progress: Progress) -> list[Row]:
    """Differences of percentiles of the time to first token."""
    rows = []
    for name, title in TITLES.items():
        for figure, where in (("idle_s", "idle"), ("busy_s", "busy")) if name in found else ():
            what = f"vLLM server, {where}: time to first token"
            rows += _added(what, title, found[name], found[NONE], figure, progress)
    return rows


def _added(
    what: str, title: str, ours: Mapping[str, list[float]], plain: Mapping[str, list[float]], figure: str,
    progress: Progress,
) -> list[Row]:  # fmt: skip
    """What is added to the percentiles of a prompt that nobody has. The limit is the percentile without tiers."""
    rows = []
    for percent in (50, 99):
        text = f"{what}, added by {title}, p{percent}"
        with_tiers, without = ([1e3 * one for one in found.get(figure, ())] for found in (ours, plain))
        added = limit = None
        if len(with_tiers) > 1 and len(without) > 1:
            limit = percentile(without, percent)
            added = Spread.of(with_tiers, without, lambda some, percent=percent: percentile(some, percent))  # type: ignore[misc]
            progress(f"{text}: {added} ms, without {limit:.2f} ms, of {len(without)}")
        goal = Goal(at_most=2) if percent == 99 else None
        rows.append(row(text, added and added.value, "ms", limit=limit, goal=goal))
    return rows


def percentile(taken: Sequence[float], percent: int) -> float:
    return statistics.quantiles(taken, n=100, method="inclusive")[percent - 1]


def first_tokens(
    engine: Engine, transfers: Mapping[str, dict[str, Any]], rounds: int, progress: Progress
) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token of prompts of two to four pages that nobody has, by server: of one that is idle, and
    of one that answers another prompt. Raises BenchError."""
    progress(f"vLLM: {len(transfers)} servers start, without tiers, and with")
    with ExitStack() as stack:
        servers = {}
        for name, transfer in transfers.items():
            (port,) = processes.free_ports(1)
            log = stack.enter_context(tempfile.TemporaryFile())
            command = [*vllm_command(engine.python, engine.model, port, transfer), *_ARGUMENTS]
            process = stack.enter_context(processes.running(command, log, SERVER_ENV, grace_s=0, leave_s=20))
            servers[name] = Server("127.0.0.1", port), process, log
        for server, process, log in servers.values():
            processes.wait_until(server.is_healthy, process, log, _SERVERS_S, "a vLLM server")
        taken: dict[str, dict[str, list[float]]] = {name: {"idle_s": [], "busy_s": []} for name in servers}
        draw = random.Random(os.urandom(8))  # prompts that were asked in no run
        vocabulary = json.loads((engine.model / "config.json").read_text())["vocab_size"]

        def tokens(count: int) -> list[int]:
            return [draw.randrange(vocabulary) for _ in range(count)]

        for number in range(-_WARM_UP, rounds):
            if number % 50 == 0:
                progress(f"vLLM: time to first token, round {number} of {rounds}")
            for name in draw.sample(sorted(servers), len(servers)):
                idle = _ask(servers[name][0], tokens)
                busy = _ask_beside(servers[name][0], tokens) if number % _LATE == 0 else []
                if number >= 0:
                    taken[name]["idle_s"].append(idle)
                    taken[name]["busy_s"] += busy
        return taken




def _ask(server: Server, tokens: Callable[[int], list[int]]) -> float:
    """Seconds to the first token of a prompt that nobody has."""
    prompt = tokens(_LONGEST_PAGES * _PAGE_TOKENS)
    body = completion(MODEL_NAME, prompt[: random.randint(_SHORTEST_PAGES * _PAGE_TOKENS + 1, len(prompt))], 1)
    try:
        return server.stream({**body, "ignore_eos": True}, _ANSWER_S).first_token_s
    except RequestFailed as error:
        raise BenchError(f"{server.url} did not answer: {error}") from error


def _ask_beside(server: Server, tokens: Callable[[int], list[int]]) -> list[float]:
    """The same of `_LATE` prompts, one after the other, while another one is answered."""
    runs, enough = threading.Event(), threading.Event()

    def read(reply: HTTPResponse) -> None:
        while not enough.is_set() and reply.read1(1 << 16):
            runs.set()

    body = {**completion(MODEL_NAME, tokens(40), 1500), "ignore_eos": True}
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(server.call, "POST", "/v1/completions", {**body, "stream": True}, _ANSWER_S, read)
        try:
            if not runs.wait(_ANSWER_S):
                raise BenchError(f"{server.url} did not answer within {_ANSWER_S:g} s")
            taken = [_ask(server, tokens) for _ in range(_LATE)]
            if other.done():
                raise BenchError(f"{server.url} ended an answer before it was wanted")
        finally:
            enough.set()  # the connection is closed, and the request aborted
        other.result()
    return taken
