"""`make bench NAME=pd`: a request through a prefill and a decode instance of real vLLM, against one instance alone.

Two servers for each connector. This process does what a router does, so that no router is measured: it sends the
prefill request and then the decode request with its answer (*sequential*), or both at once (*concurrent*), or asks
the decode instance alone. The three take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.report import Comparison, Goal, Row, row
from bench.peers.vllm import Engine, difference, median_ms, version
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.answer import RequestFailed, error_text
from mooncake_connector.cli.bench.serve.client import Server, completion, page
from mooncake_connector.cli.bench.serve.engines import MODEL_NAME, transfer_config, vllm_command
from mooncake_connector.cli.bench.serve.load import cache_tokens

ALONE, SEQUENTIAL, CONCURRENT = "alone", "sequential", "concurrent"
_START_DEADLINE_S = 600.0
_LIMIT_S = 300.0
_NIXL = "install it there with `pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1`, or name another --peer-python"


@dataclass(frozen=True)
class PDScale:
    """What is asked, and how often."""

    prompt_tokens: int = 1800
    answer_tokens: int = 8
    rounds: int = 9


QUICK = PDScale(prompt_tokens=700, rounds=1)


@dataclass(frozen=True)
class Setting:
    """A connector between two servers: their `--kv-transfer-config` and environment, by what `port` each is given."""

    transfer: Callable[[int], dict[str, Any]]
    env: Callable[[int], dict[str, str]]
    orders: tuple[str, ...]


@dataclass(frozen=True)
class Instance:
    """One vLLM server; `transfer_port` is where its connector can be asked for."""

    server: Server
    transfer_port: int

    def ask(self, prompt: list[int], answer_tokens: int, params: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a greedy answer. Raises BenchError."""
        tokens: list[int] = self._complete(prompt, answer_tokens, params)["choices"][0]["token_ids"]
        return tokens

    def prefill(self, prompt: list[int], more: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the prompt for another instance; what that has to be told. Raises BenchError."""
        answer = self._complete(prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False, **more})
        params: dict[str, Any] = answer.get("kv_transfer_params") or {}
        return params

    def tokens_from_connector(self) -> int:
        """Prompt tokens that came from another instance since the start."""
        tokens = cache_tokens(self.server)
        return tokens.connector if tokens else 0

    def _complete(self, prompt: list[int], max_tokens: int, params: Mapping[str, Any] | None) -> dict[str, Any]:
        body = {**completion(MODEL_NAME, prompt, max_tokens), "ignore_eos": True, "return_token_ids": True}
        del body["stream_options"]
        if params is not None:
            body["kv_transfer_params"] = params
        try:
            status, _, content = self.server.call("POST", "/v1/completions", body, _LIMIT_S, page)
        except RequestFailed as error:
            raise BenchError(f"{self.server.url} did not answer: {error}") from error
        if status != 200:
            raise BenchError(f"{self.server.url} answered {status}: {error_text(content)}")
        answer: dict[str, Any] = json.loads(content)
        return answer


def run(engine: Engine, peer_python: str | None, scale: PDScale, progress: Progress) -> Comparison:
    """Measure ours and, with `peer_python`, vLLM's NixlConnector. A peer that fails is left out with a warning."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    versions["vllm"] = version(engine)
    ours = measure(engine, OURS, scale, "MooncakeKVConnector", progress)
    theirs: list[dict[str, list[float]]] = []
    if peer_python is not None:
        try:
            with nixl_wheel(peer_python) as (folder, versions["nixl"]):
                for threads in NIXL_THREADS:
                    name = f"NixlConnector with num_threads={threads}"
                    theirs.append(measure(engine, nixl(folder, threads), scale, name, progress))
        except BenchError as error:
            progress(f"WARNING: NixlConnector was not measured: {error}")
    return Comparison(machine, versions, pd_rows(ours, better(theirs), scale))


@contextlib.contextmanager
def nixl_wheel(python: str) -> Iterator[tuple[Path, str]]:
    """A folder with the wheel that `python` has, to be put on an engine's path, and its version. Raises BenchError."""
    program = (
        "import importlib.metadata as m, pathlib, nixl\n"
        "print(pathlib.Path(nixl.__file__).parent.parent); print(m.version('nixl'))"
    )
    packages, version = processes.printed_by(python, program, _NIXL)[-2:]
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        for found in Path(packages).glob("*nixl*"):
            (Path(folder) / found.name).symlink_to(found)
        yield Path(folder), version


def better(runs: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The run in which the peer added least; nothing where it did not run."""
    return min(runs, key=lambda seconds: _added(seconds, SEQUENTIAL) or 0.0, default={})


def pd_rows(ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]], scale: PDScale) -> list[Row]:
    """Medians. What is added is to one instance alone between the same rounds; the peer has one order."""
    request = f"vLLM 1P1D, {scale.prompt_tokens:,}-token prompt, {scale.answer_tokens} tokens out"
    peer_added = _added(theirs, SEQUENTIAL)
    return [
        row(
            f"{request}: added to the whole request, prefill first",
            _added(ours, SEQUENTIAL),
            "ms",
            peer=peer_added,
            goal=Goal(at_most_of_peer=1),
        ),
        row(
            f"{request}: added to the whole request, both at once, layer by layer",
            _added(ours, CONCURRENT),
            "ms",
            peer=peer_added,
            goal=Goal(at_most_of_peer=0.5),
        ),
        *(
            row(f"{request}: the whole request, {text}", median_ms(ours, order), "ms",
                limit=median_ms(ours, ALONE), peer=median_ms(theirs, SEQUENTIAL))
            for order, text in ((SEQUENTIAL, "prefill first"), (CONCURRENT, "both at once, layer by layer"))
        ),
    ]  # fmt: skip


def _added(seconds: Mapping[str, list[float]], order: str) -> float | None:
    return difference(median_ms(seconds, order), median_ms(seconds, ALONE))


def _our_transfer(port: int) -> dict[str, Any]:
    return transfer_config(
        "MooncakeKVConnector", {"prefix_reuse": False, "transfer_port": port, "granularity": "layer"}
    )


OURS = Setting(_our_transfer, lambda port: {}, (SEQUENTIAL, CONCURRENT))
NIXL_THREADS = (4, 0)
"""Its own default, and none: they spin, also when nothing travels, which on few cores is what costs most."""


def nixl(overlay: Path, threads: int) -> Setting:
    """vLLM's own connector over NIXL, whose wheel is in `overlay`."""
    transfer = transfer_config("NixlConnector", {"num_threads": threads}, kv_buffer_device="cpu")
    return Setting(
        lambda port: transfer,
        lambda port: {"PYTHONPATH": str(overlay), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
        (SEQUENTIAL,),
    )


def measure(engine: Engine, setting: Setting, scale: PDScale, name: str, progress: Progress) -> dict[str, list[float]]:
    """Seconds of each request, by order. Raises BenchError where the servers do not start or nothing travels."""
    vocabulary = json.loads((engine.model / "config.json").read_text()).get("vocab_size", 32000)
    draw = random.Random(0)
    prompt = [draw.randrange(vocabulary) for _ in range(scale.prompt_tokens)]
    progress(f"{name}: starting a prefill and a decode instance of vLLM")
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        ports = processes.free_ports(4)
        commands = [_command(engine, ports[i], setting.transfer(ports[2 + i])) for i in (0, 1)]
        running = [
            stack.enter_context(
                processes.running(command, log, {**_ENV, **_cores(i), **setting.env(ports[2 + i])}, grace_s=20)
            )
            for i, command in enumerate(commands)
        ]
        prefill, decode = (Instance(Server("127.0.0.1", ports[i]), ports[2 + i]) for i in (0, 1))
        for instance, process in zip((prefill, decode), running, strict=True):
            processes.wait_until(instance.server.is_healthy, process, log, _START_DEADLINE_S, "a vLLM server")
        ways = {ALONE: lambda: decode.ask(prompt, scale.answer_tokens)}
        for order, ask in ((SEQUENTIAL, _sequential), (CONCURRENT, _concurrent)):
            if order in setting.orders:
                ways[order] = lambda ask=ask: ask(prefill, decode, prompt, scale.answer_tokens)  # type: ignore[misc]
        return _take_turns(ways, decode, scale, name, progress)


def _take_turns(
    ways: Mapping[str, Callable[[], list[int]]], decode: Instance, scale: PDScale, name: str, progress: Progress
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    answers: dict[str, list[int]] = {}
    for number in range(scale.rounds + 1):
        progress(f"{name}: round {number} of {scale.rounds}" if number else f"{name}: warming up")
        for way, ask in ways.items():
            before = decode.tokens_from_connector()
            start = time.perf_counter()
            answers[way] = ask()
            taken = time.perf_counter() - start
            if way != ALONE and number and decode.tokens_from_connector() - before < scale.prompt_tokens - 1:
                raise BenchError(f"{way}: the decode instance computed the prompt itself")
            if number:
                seconds[way].append(taken)
    if any(answer != answers[ALONE] for answer in answers.values()):
        progress(f"WARNING: {name}: the answers of one and of two instances differ")
    return seconds


def _sequential(prefill: Instance, decode: Instance, prompt: list[int], answer_tokens: int) -> list[int]:
    return decode.ask(prompt, answer_tokens, prefill.prefill(prompt, {}))


def _concurrent(prefill: Instance, decode: Instance, prompt: list[int], answer_tokens: int) -> list[int]:
    transfer_id = uuid.uuid4().hex
    where = {"remote_host": "127.0.0.1", "remote_port": prefill.transfer_port}
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id, **where}
    with ThreadPoolExecutor(1) as thread:
        prefilled = thread.submit(prefill.prefill, prompt, {"transfer_id": transfer_id})
        answer = decode.ask(prompt, answer_tokens, params)
        prefilled.result()
    return answer


_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait would take the cores from the other instance
}


def _cores(half: int) -> dict[str, str]:
    """One half of this machine's cores for the computing threads of an instance on the CPU.

    By default vLLM gives each instance all of them and ties the first thread of each to the same core, so that two
    instances hold each other up.
    """
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    share = (cores[:middle], cores[middle:])[half] or cores
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, share))}


def _command(engine: Engine, port: int, transfer: dict[str, Any]) -> list[str]:
    fixed = ("--dtype", "bfloat16", "--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching")
    return [*vllm_command(engine.python, engine.model, port, transfer), *fixed]
