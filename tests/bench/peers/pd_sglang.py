"""`make bench NAME=pd-sglang`: a request through a prefill and a decode instance of real SGLang, against one server.

One server alone, and two for each transfer backend, all at once; they take turns, so that other load on the machine
falls on all alike. This process does what a router does: it sends a request to both instances of a pair at once. No
server keeps a prefix, so each computes every prompt.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import children, mooncake_store
from bench.peers.report import Comparison, Goal, Row, row
from bench.peers.vllm import difference, median_ms
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import EventStream, RequestFailed, error_text
from mooncake_connector.cli.bench.serve.client import Server, page

ALONE, OURS, MOONCAKE = "one server", "mooncake_connector", "mooncake"
_START_DEADLINE_S = 600.0
_LIMIT_S = 300.0
_STAND_INS = Path(__file__).parents[2] / "stand_ins"
"""What SGLang asks for where there is no GPU."""
_PROBE = "import importlib.metadata as m, sglang_backend, lmdb, xxhash; print(m.version('sglang'))"
_ROOMS = 1 << 60


@dataclass(frozen=True)
class Scale:
    """What is asked, and how often: one request at a time, then a crowd of shorter ones."""

    prompt_tokens: int = 1800
    answer_tokens: int = 8
    rounds: int = 25
    crowd: int = 8
    crowd_tokens: int = 600
    crowd_rounds: int = 8


QUICK = Scale(prompt_tokens=700, rounds=1, crowd=2, crowd_tokens=200, crowd_rounds=1)


@dataclass(frozen=True, slots=True)
class Answered:
    """A greedy answer, and when it came. Logprobs are texts, so that equal means the same digits."""

    first_token_s: float
    whole_s: float
    token_ids: tuple[int, ...]
    logprobs: str


@dataclass(frozen=True)
class Way:
    """One server, or a prefill and a decode instance (`server`) with the port of prefill's bootstrap server."""

    server: Server
    prefill: Server | None = None
    bootstrap_port: int = 0

    def ask(self, prompt: Sequence[int], answer_tokens: int) -> Answered:
        """Raises BenchError."""
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": answer_tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        if self.prefill is None:
            return _stream(self.server, body)
        body |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}
        body["bootstrap_room"] = random.randrange(_ROOMS)
        with ThreadPoolExecutor(1) as thread:
            prefilled = thread.submit(_stream, self.prefill, body)
            answer = _stream(self.server, body)
            prefilled.result()
        return answer


@dataclass
class Found:
    """What one way measured; answers in the order in which all ways were asked."""

    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    """Of each request in each crowd."""
    last_s: list[float] = field(default_factory=list)
    """The latest first token of each crowd."""
    answers: list[Answered] = field(default_factory=list)


def run(sglang: Path, model: Path, peer_python: str | None, scale: Scale, progress: Progress) -> Comparison:
    """Measure ours and, with `peer_python`, SGLang's own Mooncake backend over TCP."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    versions["sglang"] = children.engine_version(sglang, "SGLang", _PROBE)
    install = mooncake_store.locate_or_warn(peer_python, progress) if peer_python is not None else None
    versions["mooncake"] = install.version if install else None
    with _ways(sglang, model, install, progress) as ways:
        found = measure(ways, _vocabulary(model), scale, progress)
    return Comparison(machine, versions, rows(found, scale))


def rows(found: Mapping[str, Found], scale: Scale) -> list[Row]:
    """Medians. What is added is to one server between the same rounds."""
    alone, ours, theirs = (found.get(name, Found()) for name in (ALONE, OURS, MOONCAKE))
    whole = [median_ms({"": one.whole_s}, "") for one in (alone, ours, theirs)]
    request = f"SGLang 1P1D, {scale.prompt_tokens:,}-token prompt, {scale.answer_tokens} tokens out"
    crowd = f"SGLang 1P1D, {scale.crowd} requests of {scale.crowd_tokens} tokens at once: time to first token"
    made = [
        row(f"{request}: added to the whole request", difference(whole[1], whole[0]), "ms",
            peer=difference(whole[2], whole[0]), goal=Goal(at_most_of_peer=0.5)),
        row(f"{request}: the whole request", whole[1], "ms", limit=whole[0], peer=whole[2]),
    ]  # fmt: skip
    for text, name in (("of all", "first_s"), ("of the last one", "last_s")):
        of_alone, value, peer = (median_ms(vars(one), name) for one in (alone, ours, theirs))
        made.append(row(f"{crowd}, {text}", value, "ms", limit=of_alone, peer=peer, goal=Goal(at_most_of_peer=1)))
    if theirs.answers:
        figure = "SGLang 1P1D, one request at a time: token ids and logprobs equal to the peer's to the last digit"
        made.append(row(figure, equal_percent(ours.answers, theirs.answers), "%", goal=Goal(at_least=100)))
    return made


def equal_percent(one: Sequence[Answered], other: Sequence[Answered]) -> float:
    same = [(a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) for a, b in zip(one, other, strict=True)]
    return 100 * statistics.mean(same)


def measure(ways: Mapping[str, Way], vocabulary: int, scale: Scale, progress: Progress) -> dict[str, Found]:
    """Each round asks every way the same prompts. Raises BenchError where one does not answer."""
    draw = random.Random(0)
    found = {name: Found() for name in ways}
    for number in range(scale.rounds + 1):
        prompt = _prompt(draw, vocabulary, scale.prompt_tokens)
        for name, way in ways.items():
            answer = way.ask(prompt, scale.answer_tokens)
            if number:  # the first warms up
                found[name].whole_s.append(answer.whole_s)
                found[name].answers.append(answer)
        if number:
            taken = ", ".join(f"{name} {one.whole_s[-1]:.3f} s" for name, one in found.items())
            progress(f"SGLang: round {number} of {scale.rounds}: {taken}")
    for number in range(1, scale.crowd_rounds + 1):
        progress(f"SGLang: {scale.crowd} requests at once, round {number} of {scale.crowd_rounds}")
        prompts = [_prompt(draw, vocabulary, scale.crowd_tokens) for _ in range(scale.crowd)]
        for name, way in ways.items():
            with ThreadPoolExecutor(scale.crowd) as threads:
                answers = list(threads.map(lambda prompt, way=way: way.ask(prompt, scale.answer_tokens), prompts))  # type: ignore[misc]
            found[name].first_s.extend(answer.first_token_s for answer in answers)
            found[name].last_s.append(max(answer.first_token_s for answer in answers))
    return found


def _prompt(draw: random.Random, vocabulary: int, num_tokens: int) -> list[int]:
    return [draw.randrange(vocabulary) for _ in range(num_tokens)]


def _vocabulary(model: Path) -> int:
    size: int = json.loads((model / "config.json").read_text()).get("vocab_size", 32000)
    return size


@contextlib.contextmanager
def _ways(
    sglang: Path, model: Path, peer: mooncake_store.Install | None, progress: Progress
) -> Iterator[dict[str, Way]]:
    """All servers, started side by side."""
    with contextlib.ExitStack() as stack:
        backends = [OURS] if peer is None else [OURS, MOONCAKE]
        progress(f"SGLang: starting one server, and a prefill and a decode instance for each of {', '.join(backends)}")
        wheel = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        overlay = () if peer is None else (mooncake_store.overlay(peer, wheel / "wheel"),)
        servers = []

        def start(arguments: Iterable[str] = ()) -> Server:
            log = stack.enter_context(tempfile.TemporaryFile())
            (port,) = processes.free_ports(1)
            env = _environment(overlay)
            process = stack.enter_context(processes.running(_command(sglang, model, port, arguments), log, env))
            servers.append((Server("127.0.0.1", port), process, log))
            return servers[-1][0]

        ways = {ALONE: Way(start())}
        for backend in backends:
            (port,) = processes.free_ports(1)
            common = ("--disaggregation-bootstrap-port", str(port), "--disaggregation-transfer-backend", backend)
            prefill, decode = (start(("--disaggregation-mode", mode, *common)) for mode in ("prefill", "decode"))
            ways[backend] = Way(decode, prefill, port)
        for server, process, log in servers:
            processes.wait_until(server.is_healthy, process, log, _START_DEADLINE_S, "an SGLang server")
        yield ways


def _command(sglang: Path, model: Path, port: int, arguments: Iterable[str]) -> list[str]:
    fixed = (
        *("--host", "127.0.0.1", "--page-size", "64", "--dtype", "float32", "--max-total-tokens", "8192"),
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
        *("--disable-radix-cache", "--disable-overlap-schedule", "--sleep-on-idle", "--skip-server-warmup"),
    )
    # Not resolved: that would lose a virtual environment.
    command = [str(sglang.absolute()), "-m", "sglang.launch_server", "--model-path", str(model.resolve())]
    return [*command, "--port", str(port), *fixed, *arguments]


def _environment(overlay: Sequence[Path]) -> dict[str, str]:
    """Half of the cores for the computing threads of each instance; Mooncake over TCP."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (*overlay, _STAND_INS))),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait would take the cores from the other instance
        "MC_FORCE_TCP": "1",
        "MOONCAKE_PROTOCOL": "tcp",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(Path(".cache/torch_extensions").absolute()),
    }


def _stream(server: Server, body: Mapping[str, Any]) -> Answered:
    start = time.perf_counter()

    def read(reply: http.client.HTTPResponse) -> Answered:
        if reply.status != 200:
            raise RequestFailed(f"answered {reply.status}: {error_text(page(reply)[2])}", reply.status)
        events, first_s, last = EventStream(), None, {}
        while piece := reply.read1(1 << 16):
            for data in events.feed(piece):
                if data != "[DONE]":
                    last = json.loads(data)
                    if "error" in last:
                        raise RequestFailed(f"failed while it answered: {error_text(data.encode())}")
                    if first_s is None and last["output_ids"]:
                        first_s = time.perf_counter() - start
        if first_s is None:
            raise RequestFailed("the stream ended without a token")
        logprobs = json.dumps([step[0] for step in last["meta_info"]["output_token_logprobs"]])
        return Answered(first_s, time.perf_counter() - start, tuple(last["output_ids"]), logprobs)

    try:
        return server.call("POST", "/generate", {**body, "stream": True}, _LIMIT_S, read)
    except RequestFailed as error:
        raise BenchError(f"{server.url} did not answer: {error}") from error
