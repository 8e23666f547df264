"""The rows that need vLLM: time to first token of a warm request, and the scheduler step beside an idle connector."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import children, mooncake_store
from bench.peers.report import Goal, Row, row
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.serve.engines import transfer_config

_DEADLINE_S = 600.0
_HIT_TOKENS = 1900
_PROMPT_TOKENS = 1960
_TTFT_ROUNDS = 9
_IDLE_ROUNDS = 200
_IDLE_REQUESTS = 64
OURS = "MooncakeKVConnector"
SERVER_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # servers that wait for their turn take no core
}
"""For a server with one thread."""


@dataclass(frozen=True)
class Engine:
    """A vLLM environment that has this package as well, and the model to serve in it."""

    python: Path
    model: Path


def version(engine: Engine) -> str:
    """vLLM's version. Raises BenchError that says what to install where vLLM or this package is missing."""
    probe = "import vllm, vllm_plugin, lmdb, xxhash; print(vllm.__version__)"
    return children.engine_version(engine.python, "vLLM", probe)


def measure(engine: Engine, peer: mooncake_store.Install | None, folder: Path, progress: Progress) -> list[Row]:
    """All rows that need vLLM; what a child could not measure is None in its row, with a warning."""
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-bench-", dir=folder) as name:
        progress(f"vLLM: scheduler step with {_IDLE_REQUESTS} requests, connector idle")
        idle = run_child(engine, "vllm_idle", _idle_order(Path(name)), {}, progress)
        progress(f"vLLM: time to first token with {OURS}")
        ours = run_child(engine, "vllm_ttft", _ttft_order(_our_transfer(Path(name))), {}, progress)
        theirs = _in_tree(engine, peer, progress) if peer else {}
    return [*ttft_rows(ours, theirs), idle_row(idle)]


def ttft_rows(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Row]:
    """Medians. The limit is the same request when vLLM's own prefix cache has everything; our part is beyond that."""
    request = f"vLLM, warm request that hits {_HIT_TOKENS:,} tokens"
    warm, local = median_ms(ours, "connector_s"), median_ms(ours, "local_s")
    peer, peer_local = median_ms(theirs, "connector_s"), median_ms(theirs, "local_s")
    return [
        row(
            f"{request}: the connector's part of the time to first token",
            difference(warm, local),
            "ms",
            peer=difference(peer, peer_local),
            goal=Goal(at_most=60),
        ),
        row(
            f"{request}: the whole time to first token",
            warm,
            "ms",
            limit=local,
            peer=peer,
            goal=Goal(at_most_of_peer=1),
        ),
    ]


def idle_row(idle: dict[str, Any]) -> Row:
    """Best rounds. The limit is a connector that does nothing."""
    without, ours, empty = (min(idle.get(name, ()), default=None) for name in ("without_s", "with_s", "empty_s"))
    figure = f"vLLM, scheduler step with {_IDLE_REQUESTS} requests, change by the idle connector"
    return row(figure, _change(ours, without), "%", limit=_change(empty, without), goal=Goal(at_most=1))


def median_ms(seconds: Mapping[str, Sequence[float]], name: str) -> float | None:
    """None where nothing was measured under this name."""
    return statistics.median(seconds[name]) * 1e3 if seconds.get(name) else None


def difference(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _change(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else 100 * (value / base - 1)


def _our_transfer(folder: Path) -> dict[str, Any]:
    return transfer_config(OURS, {"pool": str(folder / "pool"), "capacity": "512MiB"})


def _idle_order(folder: Path) -> dict[str, Any]:
    return {"transfer": _our_transfer(folder), "num_requests": _IDLE_REQUESTS, "rounds": _IDLE_ROUNDS}


def _ttft_order(transfer: dict[str, Any]) -> dict[str, Any]:
    sizes = {"prompt_tokens": _PROMPT_TOKENS, "hit_tokens": _HIT_TOKENS, "rounds": _TTFT_ROUNDS}
    return {"transfer": transfer, **sizes}


def _in_tree(engine: Engine, peer: mooncake_store.Install, progress: Progress) -> dict[str, Any]:
    """The same request through vLLM's own connector for the Mooncake Store, whose segment is in that process."""
    name = mooncake_store.IN_TREE["kv_connector"]
    progress(f"vLLM: time to first token with {name}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        log = stack.enter_context(tempfile.TemporaryFile())
        try:
            address = stack.enter_context(mooncake_store.master(peer, log))
        except BenchError as error:
            progress(f"WARNING: {name} was not measured: {error}")
            return {}
        found = children.path(mooncake_store.overlay(peer, folder / "wheel"), children.SCRIPTS)
        env = {**mooncake_store.vllm_settings(address, folder, 512 << 20), **found}
        return run_child(engine, "vllm_ttft", _ttft_order(mooncake_store.IN_TREE), env, progress)


def run_child(
    engine: Engine, script: str, order: dict[str, Any], env: dict[str, str], progress: Progress
) -> dict[str, Any]:
    """What a script measured; with a warning where it did not measure all. The order lacks model and outcome."""
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as name:
        outcome = Path(name) / "outcome"
        order = {**order, "model": str(engine.model.resolve()), "outcome": str(outcome)}
        settings = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", **env}
        found = children.run(
            children.script(engine.python, script, order), outcome, deadline_s=_DEADLINE_S, env=settings
        )
    if "error" in found:
        subject = order.get("transfer", {}).get("kv_connector", OURS)
        progress(f"WARNING: {script} of {subject} failed: {found['error']}")
    return found
