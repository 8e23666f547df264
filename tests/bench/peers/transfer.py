"""`make bench NAME=transfer`: our transports beside NIXL and Mooncake, a busy Python thread, and links that are cut.

A peer is two processes of its own, host memory to host memory: Mooncake's Transfer Engine over TCP with its connection
pool off and on; NIXL with UCX's own choice and over TCP alone.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import children, links, planning, steps
from bench.peers.mooncake_store import tcp_settings
from bench.peers.report import Comparison, Goal, Row, best_between, judged, row
from mooncake_connector.cli.bench import processes, transfer
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress, best_seconds, gigabytes_per_second, size_text
from mooncake_connector.cli.bench.report import Report
from mooncake_connector.cli.bench.transfer_scale import QUICK as MOVE_QUICK
from mooncake_connector.cli.bench.transfer_scale import Scale as MoveScale

NIXL, NIXL_TCP = "NIXL, UCX's own choice", "NIXL, UCX_TLS=tcp"
MOONCAKE_OFF, MOONCAKE_ON = "Mooncake Transfer Engine, pool off", "Mooncake Transfer Engine, pool on"
SCATTERED, SMALL = "scattered", "small"

PeerSeconds = Mapping[str, Mapping[str, Any]]
"""What was measured of each peer and setting: seconds under `SCATTERED`, (p50, p99) under `SMALL`, or nothing."""

_SETTINGS: dict[str, tuple[str, Mapping[str, str]]] = {
    NIXL: ("nixl", {}),
    NIXL_TCP: ("nixl", {"UCX_TLS": "tcp"}),
    MOONCAKE_OFF: ("mooncake", tcp_settings("0")),
    MOONCAKE_ON: ("mooncake", tcp_settings("1")),
}
_GOALS = {
    "cma": Goal(at_least_of_limit=0.9, at_least_of_peer=1.8),
    "shm": Goal(at_least_of_limit=0.3),
    "tcp:": Goal(at_least_of_limit=0.9, at_least_of_peer=1.3),
}
_SMALL_PEERS = {"cma": NIXL, "shm": NIXL, "tcp": NIXL_TCP}
INSTALL = {
    "mooncake": "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    "nixl": "--no-deps nixl==1.5.1 nixl-cu12==1.5.1",
}
"""What pip is told; the versions are those that our figures are compared with."""
_START_DEADLINE_S = 60.0
_BUDGET_S = 20.0
"""A peer that needs longer for its rounds is measured by fewer of them."""


@dataclass(frozen=True)
class Scale:
    """How much a run does."""

    move: MoveScale = MoveScale()  # noqa: RUF009 it is frozen
    steps: int = 200
    step_rounds: int = 5
    links: links.LinkScale = links.LinkScale()  # noqa: RUF009


QUICK = Scale(MOVE_QUICK, steps=4, step_rounds=1, links=links.QUICK)


def run(scale: Scale, *, peers: Collection[str], peer_python: str, progress: Progress) -> Comparison:
    """Measure everything. A transport that does not work here, or a peer, is left out with a warning."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    move = scale.move
    with transfer.connected(move, progress) as ends:
        progress("scattered pieces: ours, process_vm_readv, memcpy and bare TCP in turn")
        tasks = transfer.moving_tasks(ends, move)
        seconds = best_seconds(tasks, move.rounds)
        progress("one small transfer: ours and bare round trips in turn")
        quantiles = transfer.measure_small(ends, move)
        progress("a busy Python thread beside each transport")
        beside = {}
        for name in ends.small_peers():
            elsewhere = functools.partial(steps.moving_elsewhere, name, ends.far, move)
            beside[name] = steps.beside(tasks[name].run, elsewhere, scale.steps, scale.step_rounds)
        progress("transports on libraries, and these alone, in turn")
        seconds |= transfer.measure_libraries(ends, move, progress)
    progress("two links of 1 Gbit/s: striping, a link that is cut, layers that travel while the next one is computed")
    over_links = links.measure(scale.links, progress)
    progress("planning")
    planned = planning.planning_row(move.rounds)
    measured = measure_peers(peers, peer_python, move, progress)
    rows = [
        *moving_rows(seconds, measured, move),
        *small_rows(quantiles, measured, move),
        *steps.rows(beside, seconds, move),
        *links.rows(over_links, scale.links),
        planned,
        *peer_rows(measured, move),
    ]
    return Comparison(machine, versions, rows)


def moving_rows(seconds: Mapping[str, float], peers: PeerSeconds, scale: MoveScale) -> list[Row]:
    """By transport. The peer of tcp is the better Mooncake setting; another row holds tcp against NIXL over TCP."""
    mooncake = best_between(peers, (MOONCAKE_OFF, MOONCAKE_ON), SCATTERED)
    theirs = {"cma": _rate(peers, NIXL, scale), "tcp:": mooncake and gigabytes_per_second(scale.data_nbytes, mooncake)}
    rows = judged(Report({}, {}, transfer.moving_rows(seconds, scale)), _GOALS, theirs)
    if "tcp" in seconds and peers:
        rate, goal = gigabytes_per_second(scale.data_nbytes, seconds["tcp"]), Goal(at_least_of_peer=2)
        peer = _rate(peers, NIXL_TCP, scale)
        rows.append(row("tcp, against NIXL over TCP", rate, "GB/s", peer=peer, goal=goal))
    return rows


def small_rows(quantiles: transfer.Quantiles, peers: PeerSeconds, scale: MoveScale) -> list[Row]:
    """One small transfer may take half as long again as the bare round trip of its kind."""
    rows = []
    for item in transfer.small_rows(quantiles, scale):
        theirs = peers.get(_SMALL_PEERS[item.figure.partition(":")[0]], {}).get(SMALL)
        peer = theirs and theirs["p99" in item.figure] * 1e6
        goal = Goal(at_most=round(1.5 * item.limit, 1))
        rows.append(row(item.figure, item.value, item.unit, limit=item.limit, peer=peer, goal=goal))
    return rows


def peer_rows(peers: PeerSeconds, scale: MoveScale) -> list[Row]:
    """Everything that was measured of the peers; there are no goals for it."""
    shape = f"{scale.pieces:,} x {size_text(scale.piece_nbytes)}"
    return [row(f"{name}: {shape}", _rate(peers, name, scale), "GB/s") for name in peers]


def _rate(peers: PeerSeconds, name: str, scale: MoveScale) -> float | None:
    seconds = peers.get(name, {}).get(SCATTERED)
    return gigabytes_per_second(scale.data_nbytes, seconds) if seconds else None


def measure_peers(
    peers: Collection[str], python: str, scale: MoveScale, progress: Progress
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
                results[setting] = {"error": str(error)}
        if "error" in results[setting]:
            progress(f"WARNING: {setting}: {results[setting]['error']}")
    return results


def _measure_one(
    engine: str, python: str, scale: MoveScale, env: Mapping[str, str], folder: Path, log: Any
) -> dict[str, Any]:
    sizes = {"pieces": scale.pieces, "piece_nbytes": scale.piece_nbytes, "rounds": scale.rounds}
    small = {"small_nbytes": scale.small_nbytes, "small_rounds": scale.small_rounds}

    def command(role: str, **more: Any) -> list[str]:
        peer = {"engine": engine, "install": INSTALL[engine], "budget_s": _BUDGET_S, "role": role}
        order = {**sizes, **small, **more, **peer}
        return children.script(python, "transfer_client", {**order, "outcome": str(folder / role)})

    with processes.running(command("hold"), log, env) as process:
        processes.wait_until((folder / "hold").exists, process, log, _START_DEADLINE_S, "the peer's other process")
        there = children.read_outcome(folder / "hold")
        return children.run(command("measure", there=there), folder / "measure", deadline_s=120, env=env)
