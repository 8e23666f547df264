"""Start the peers of `bench transfer` on this machine and measure them: two processes each, host memory to host memory.

Mooncake's Transfer Engine over TCP with its connection pool off and on; NIXL with UCX's own choice and over TCP alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mooncake_connector.cli.bench import processes, transfer_rows
from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.mooncake_peer import tcp_settings
from mooncake_connector.cli.bench.transfer_scale import TransferScale

MOONCAKE, NIXL = "mooncake", "nixl"
_SETTINGS: dict[str, tuple[str, Mapping[str, str]]] = {
    transfer_rows.NIXL: (NIXL, {}),
    transfer_rows.NIXL_TCP: (NIXL, {"UCX_TLS": "tcp"}),
    transfer_rows.MOONCAKE_OFF: (MOONCAKE, tcp_settings("0")),
    transfer_rows.MOONCAKE_ON: (MOONCAKE, tcp_settings("1")),
}
_SCRIPT = Path(__file__).parent / "transfer_peer_client.py"
_START_DEADLINE_S = 60.0
_BUDGET_S = 20.0
"""A peer that needs longer for its rounds is measured by fewer of them."""


def measure(
    peers: Collection[str], python: str, scale: TransferScale, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """What was measured of each setting of each peer; an error, and a warning, where one fails."""
    results: dict[str, dict[str, Any]] = {}
    for setting, (engine, env) in _SETTINGS.items():
        if engine not in peers:
            continue
        progress(setting)
        with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder, tempfile.TemporaryFile() as log:
            try:
                results[setting] = _measure_one(engine, python, scale, env, Path(folder), log)
            except (BenchError, OSError) as error:
                results[setting] = {"error": f"{error}: {processes.last_lines(log)}"}
        if "error" in results[setting]:
            progress(f"WARNING: {setting}: {results[setting]['error']}")
    return results


def _measure_one(
    engine: str, python: str, scale: TransferScale, env: Mapping[str, str], folder: Path, log: Any
) -> dict[str, Any]:
    sizes = {"pieces": scale.pieces, "piece_nbytes": scale.piece_nbytes, "rounds": scale.rounds}
    small = {"small_nbytes": scale.small_nbytes, "small_rounds": scale.small_rounds}
    order = {**sizes, **small, "engine": engine, "budget_s": _BUDGET_S}

    def command(role: str, outcome: Path, **more: Any) -> list[str]:
        return [python, str(_SCRIPT), json.dumps({**order, **more, "role": role, "outcome": str(outcome)})]

    held = folder / "hold"
    with processes.running(command("hold", held), log, env) as process:
        processes.wait_until(held.exists, process, _START_DEADLINE_S, "the peer's other process")
        outcome = folder / "measure"
        there = processes.read_outcome(held)
        return processes.run_script(command("measure", outcome, there=there), outcome, deadline_s=120, env=env)
