"""The rows of `bench transfer` and their goals: from measured seconds to figures. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mooncake_connector.cli.bench.measure import gigabytes_per_second
from mooncake_connector.cli.bench.report import Goal, Row, row
from mooncake_connector.cli.bench.store_rows import size_text
from mooncake_connector.cli.bench.transfer_links import LAYER_KV_S, LAYER_S, LinkFigures
from mooncake_connector.cli.bench.transfer_network import LINK_GBITS, LINKS
from mooncake_connector.cli.bench.transfer_scale import TransferScale
from mooncake_connector.cli.bench.transfer_steps import Beside
from mooncake_connector.cli.bench.transfer_tls import NAME as TLS

READV, MEMCPY, RAW_TCP = "process_vm_readv", "memcpy", "sendall/recv_into"
NIXL, NIXL_TCP = "NIXL, UCX's own choice", "NIXL, UCX_TLS=tcp"
MOONCAKE_OFF, MOONCAKE_ON = "Mooncake Transfer Engine, pool off", "Mooncake Transfer Engine, pool on"
SCATTERED, SMALL = "scattered", "small"

PeerSeconds = Mapping[str, Mapping[str, Any]]
"""What was measured of each peer and setting: seconds under `SCATTERED`, (p50, p99) under `SMALL`, or nothing."""

_LIMITS = {
    "cma": (READV, Goal(at_least_of_limit=0.9, at_least_of_peer=1.8)),
    "shm": (MEMCPY, Goal(at_least_of_limit=0.3)),
    "tcp": (RAW_TCP, Goal(at_least_of_limit=0.9, at_least_of_peer=1.3)),
}


def moving_rows(seconds: Mapping[str, float], peers: PeerSeconds, scale: TransferScale) -> list[Row]:
    """Scattered pieces to scattered places, by transport. The peer of tcp is the better Mooncake setting; another row
    holds tcp against NIXL over TCP."""
    shape = f"{scale.pieces:,} x {size_text(scale.piece_nbytes)}, scattered to scattered"
    rates = {name: gigabytes_per_second(scale.data_nbytes, taken) for name, taken in seconds.items()}
    theirs = {name: _rate(peers, name, scale) for name in peers}
    best_mooncake = max(filter(None, (theirs.get(MOONCAKE_OFF), theirs.get(MOONCAKE_ON))), default=None)
    peer_of = {"cma": theirs.get(NIXL), "tcp": best_mooncake}
    rows = [
        row(f"{name}: {shape}", rates[name], "GB/s", limit=rates[limit], peer=peer_of.get(name), goal=goal)
        for name, (limit, goal) in _LIMITS.items()
        if name in rates
    ]
    if TLS in rates and "tcp" in rates:
        rows.append(row(f"{TLS} (limit: tcp without)", rates[TLS], "GB/s", limit=rates["tcp"]))
    if "tcp" in rates and peers:
        goal = Goal(at_least_of_peer=2)
        rows.append(row("tcp, against NIXL over TCP", rates["tcp"], "GB/s", peer=theirs.get(NIXL_TCP), goal=goal))
    return rows


def latency_rows(quantiles: Mapping[str, tuple[float, float]], peers: PeerSeconds, scale: TransferScale) -> list[Row]:
    """One small transfer, held against the bare round trip of its kind, at the median and the 99th percentile."""
    rows = []
    for name, bare, peer in (("cma", READV, NIXL), ("shm", RAW_TCP, NIXL), ("tcp", RAW_TCP, NIXL_TCP)):
        if name not in quantiles:
            continue
        for which, label in enumerate(("p50", "p99")):
            value, limit = quantiles[name][which] * 1e6, quantiles[bare][which] * 1e6
            figure = f"{name}: one transfer of {size_text(scale.small_nbytes)}, {label} (limit: {bare})"
            goal = Goal(at_most=round(1.5 * limit, 1))
            theirs = peers.get(peer, {}).get(SMALL)
            rows.append(row(figure, value, "us", limit=limit, peer=theirs and theirs[which] * 1e6, goal=goal))
    return rows


def step_rows(beside: Mapping[str, Beside], seconds: Mapping[str, float], scale: TransferScale) -> list[Row]:
    """A transfer and a busy Python thread of one process: what it does to the thread's steps, and they to it."""
    limit = "limit: beside the same between two other processes"
    figure = f"5 ms steps of a Python thread beside it, p99 over undisturbed ({limit})"
    rows = []
    for name, found in beside.items():
        rows.append(row(f"{name}: {figure}", found.here, "times", limit=found.elsewhere, goal=Goal(at_most=1.1)))
        rates = [gigabytes_per_second(scale.data_nbytes, taken) for taken in (found.seconds, seconds[name])]
        rows.append(row(f"{name}: beside such a thread (limit: alone)", rates[0], "GB/s", limit=rates[1]))
    return rows


def link_rows(figures: LinkFigures | None, scale: TransferScale) -> list[Row]:
    """Over two links of 1 Gbit/s, where they could be made."""
    if figures is None:
        return []
    striped = scale.link_nbytes * 8 / figures.striped / 1e9
    cut = "tcp: one of the two links cut in mid-transfer"
    rows = [
        row("tcp: striped over two links", striped, "Gbit/s", limit=LINKS * LINK_GBITS, goal=Goal(at_least=1.8)),
        row(f"{cut}: what arrived right", 100 * figures.right_share, "%", goal=Goal(at_least=100)),
        row(f"{cut}: from the cut to the end", figures.after_cut, "s"),
    ]
    for (granularity, passes), seconds in figures.last_byte.items():
        computed = "one pass" if passes == 1 else f"{passes} passes"
        figure = (
            f"{granularity}: last byte after the last of {scale.layers} layers, {LAYER_S * 1e3:g} ms each in {computed}"
            f", KV {LAYER_KV_S * 1e3:g} ms"
        )
        goal = Goal(at_most=LAYER_S * 1e3) if (granularity, passes) == ("layer", 1) else None
        rows.append(row(figure, seconds * 1e3, "ms", goal=goal))
    return rows


def planning_row(seconds: float) -> Row:
    figure = "planning 128k tokens, 80 layers, TP 4 to TP 8: what one source rank sends to one destination"
    return row(figure, seconds * 1e3, "ms", goal=Goal(at_most=20))


def peer_rows(peers: PeerSeconds, scale: TransferScale) -> list[Row]:
    """Everything that was measured of the peers; there are no goals for it."""
    shape = f"{scale.pieces:,} x {size_text(scale.piece_nbytes)}"
    return [row(f"{name}: {shape}", _rate(peers, name, scale), "GB/s") for name in peers]


def _rate(peers: PeerSeconds, name: str, scale: TransferScale) -> float | None:
    seconds = peers[name].get(SCATTERED)
    return gigabytes_per_second(scale.data_nbytes, seconds) if seconds else None
