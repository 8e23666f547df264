"""Processes of a comparison: modules of this folder, and scripts that an engine's or a peer's own interpreter runs.

A script imports only what lies beside it: the interpreter that runs it need not have this project. Each writes its
outcome as JSON into a file that it replaces as a whole (`scripts/outcome.py`), ended by ``"ready": true``.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError

SCRIPTS = Path(__file__).parent / "scripts"
_TESTS = Path(__file__).parents[2]
_LEAVE_S = 20.0
"""How long a child that has measured may take to leave: vLLM unlinks its shared memory then."""


def module(python: str | Path, name: str, order: Mapping[str, Any]) -> list[str]:
    """The command that runs a module of this folder; with `path()` in its environment."""
    return [str(python), "-m", f"bench.peers.{name}", json.dumps(order)]


def script(python: str | Path, name: str, order: Mapping[str, Any]) -> list[str]:
    return [str(python), str(SCRIPTS / f"{name}.py"), json.dumps(order)]


def path(*first: Path) -> dict[str, str]:
    """The environment in which these modules are found, behind the folders in `first`."""
    found = [*map(str, first), str(_TESTS), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, found))}


def run(
    command: Sequence[str], outcome: Path, *, deadline_s: float, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a child to its end. Returns its outcome: all figures, or those that were ready before it failed, in which
    case ``"error"`` says why (with the end of its output). Never raises for what the child does."""

    def is_ready() -> bool:
        return bool(read_outcome(outcome).get("ready"))

    with tempfile.TemporaryFile() as log:
        try:
            with processes.running(command, log, env, grace_s=_LEAVE_S) as process:
                processes.wait_until(is_ready, process, log, deadline_s, "the measuring process")
        except BenchError as problem:
            return {**read_outcome(outcome), "error": str(problem)}
    return read_outcome(outcome)


def read_outcome(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; empty where there is no file yet."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def accepts(port: int) -> bool:
    """Whether somebody listens on this port of the loopback."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def engine_version(python: Path, engine: str, program: str) -> str:
    """What ``program`` prints in ``python``: it imports the engine and this project."""
    return processes.printed_by(python, program, f"it needs {engine} and mooncake-connector")[-1]
