"""`make bench NAME=store`: the store, the size of its index and vLLM's time to first token, beside a Mooncake Store."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.peers import index, mooncake_store, vllm
from bench.peers.mooncake_store import BETWEEN
from bench.peers.report import Comparison, Goal, Row, best_between, judged, row
from mooncake_connector.cli.bench import store
from mooncake_connector.cli.bench.machine import check_room, describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import Progress, gigabytes_per_second
from mooncake_connector.cli.bench.report import Report
from mooncake_connector.cli.bench.store import GET, GET_SCATTERED, LOOKUP, MEMCPY, PREFIX, PUT, Scale

PEERS = ("mooncake",)
TITLES = {GET: "get, ", PUT: "put, ", GET_SCATTERED: "get into", LOOKUP: "one lookup", PREFIX: "prefix lookup"}
GOALS = {
    GET: Goal(at_least_of_limit=0.45, at_least_of_peer=4),
    PUT: Goal(at_least_of_limit=0.4, at_least_of_peer=4),
    GET_SCATTERED: Goal(at_least_of_limit=0.35),
    LOOKUP: Goal(at_most=5, at_most_of_peer=1 / 20),
    PREFIX: Goal(at_most=1.2, at_most_of_peer=1 / 2),
}

PeerSeconds = Mapping[str, Mapping[str, Any]]
"""Seconds by figure for each of `mooncake_store`'s settings; empty where no peer was measured."""


def run(
    folder: Path, *, quick: bool, peers: Collection[str], peer_python: str, engine: vllm.Engine | None,
    progress: Progress,
) -> Comparison:  # fmt: skip
    """Measure everything that was asked for. A peer without its wheel is left out with a warning."""
    scale, sizes = (store.QUICK, index.QUICK) if quick else (Scale(), index.Sizes())
    check_room(folder, 3 * scale.data_nbytes + 300 * sizes.large + (256 << 20))
    machine, versions = describe_machine(folder), describe_versions()
    if engine:
        versions["vllm"] = vllm.version(engine)
    seconds = store.measure(folder, scale, progress)
    with tempfile.TemporaryDirectory(prefix="mooncake-connector-bench-", dir=folder) as name:
        growth = index.measure(Path(name), sizes, progress)
    install = mooncake_store.locate_or_warn(peer_python or sys.executable, progress) if peers else None
    peer = mooncake_store.measure(install, scale, progress) if install else {}
    versions["mooncake"] = install.version if install else None
    rows = [*store_rows(seconds, peer, scale), *growth]
    if engine:
        rows += vllm.measure(engine, install, folder, progress)
    return Comparison(machine, versions, rows + peer_rows(peer, scale, seconds[MEMCPY]))


def store_rows(seconds: dict[str, float], peer: PeerSeconds, scale: Scale) -> list[Row]:
    """Ours with its goals, beside the better of the peer's connection pool on and off, between two processes."""
    theirs = {figure: best_between(peer, BETWEEN, figure) for figure in TITLES}
    peers = {TITLES[figure]: _value(figure, taken, scale) if taken else None for figure, taken in theirs.items()}
    goals = {TITLES[figure]: goal for figure, goal in GOALS.items()}
    return judged(Report({}, {}, store.rows(seconds, scale)), goals, peers)


def peer_rows(peer: PeerSeconds, scale: Scale, memcpy_seconds: float) -> list[Row]:
    """Everything that was measured of the peer, setting by setting; there are no goals for it."""
    memcpy = gigabytes_per_second(scale.data_nbytes, memcpy_seconds)
    return [
        row(
            f"Mooncake Store, {figure}, {setting}",
            _value(figure, seconds[figure], scale) if figure in seconds else None,
            {LOOKUP: "us", PREFIX: "ms"}.get(figure, "GB/s"),
            limit=None if figure in (LOOKUP, PREFIX) else memcpy,
        )
        for setting, seconds in peer.items()
        for figure in (GET, PUT, GET_SCATTERED, LOOKUP, PREFIX)
    ]


def _value(figure: str, seconds: float, scale: Scale) -> float:
    """In the unit of the figure's row."""
    if figure in (LOOKUP, PREFIX):
        return seconds * {LOOKUP: 1e6, PREFIX: 1e3}[figure]
    return gigabytes_per_second(scale.data_nbytes, seconds)
