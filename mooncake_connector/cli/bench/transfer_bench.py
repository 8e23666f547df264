"""One run of `bench transfer`: our transports, the bare system calls and the peers, each between two processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_connector.cli.bench import (
    transfer_links,
    transfer_peers,
    transfer_planning,
    transfer_rows,
    transfer_steps,
)
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Task, best_seconds
from mooncake_connector.cli.bench.report import Report
from mooncake_connector.cli.bench.transfer_child import FETCH
from mooncake_connector.cli.bench.transfer_far import DEADLINE_S, Far, far_process
from mooncake_connector.cli.bench.transfer_mover import moving_elsewhere
from mooncake_connector.cli.bench.transfer_rows import MEMCPY, RAW_TCP, READV
from mooncake_connector.cli.bench.transfer_scale import TransferScale
from mooncake_connector.cli.bench.transfer_tls import NAME as TLS
from mooncake_connector.cli.bench.transfer_tls import make_certificate
from transfer.control.handshake import Identity
from transfer.transports.base import Peer, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.registry import HOST_NAMES, make_transports
from transfer.transports.tls import Tls
from transfer.transports.vectors import Vector, read_process

Progress = Callable[[str], None]


def run(scale: TransferScale, *, peers: Collection[str], peer_python: str, progress: Progress) -> Report:
    """Measure everything. A transport that does not work here, or a peer, is left out with a warning."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    source = np.ones(scale.memory_nbytes, dtype=np.uint8)
    memory = Memory()
    memory.register(source.ctypes.data, source.nbytes)
    with contextlib.ExitStack() as stack:
        tls = _certificate(stack, progress)
        far = stack.enter_context(far_process(scale, tls))
        connected = {}
        for name in HOST_NAMES:
            transports = stack.enter_context(make_transports([name], memory, Identity()))
            try:
                connected[name] = transports.connect(far.endpoints, deadline_s=DEADLINE_S)
            except Unavailable as error:
                progress(f"WARNING: {name} is left out: {error}")
        progress("scattered pieces: ours, process_vm_readv, memcpy and bare TCP in turn")
        moving = dict(connected)
        if tls is not None:
            secured = stack.enter_context(make_transports(["tcp"], memory, Identity(), tls=Tls(**tls)))
            moving[TLS] = secured.connect({"tcp": far.endpoints[TLS]}, deadline_s=DEADLINE_S)
        tasks = _moving_tasks(moving, far, source, scale)
        seconds = best_seconds(tasks, scale.rounds)
        progress("one small transfer: ours and bare round trips in turn")
        quantiles = _small(connected, far, source, scale)
        progress("a busy Python thread beside each transport")
        beside = {}
        for name in connected:
            elsewhere = functools.partial(moving_elsewhere, name, far, scale)
            beside[name] = transfer_steps.beside(tasks[name].run, elsewhere, scale.steps, scale.step_rounds)
    progress("two links of 1 Gbit/s: striping, a link that is cut, layers that travel while the next one is computed")
    links = transfer_links.measure(scale, progress)
    progress("planning")
    planned = transfer_planning.seconds(scale.rounds)
    measured = transfer_peers.measure(peers, peer_python, scale, progress)
    rows = [
        *transfer_rows.moving_rows(seconds, measured, scale),
        *transfer_rows.latency_rows(quantiles, measured, scale),
        *transfer_rows.step_rows(beside, seconds, scale),
        *transfer_rows.link_rows(links, scale),
        transfer_rows.planning_row(planned),
        *transfer_rows.peer_rows(measured, scale),
    ]
    return Report(machine, versions, rows)


def _certificate(stack: contextlib.ExitStack, progress: Progress) -> dict[str, str] | None:
    try:
        return make_certificate(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    except (OSError, subprocess.CalledProcessError) as error:
        progress(f"WARNING: {TLS} is left out, its certificate is made with openssl: {error}")
        return None


def _moving_tasks(
    connected: dict[str, Peer], far: Far, source: np.ndarray[Any, Any], scale: TransferScale
) -> dict[str, Task]:
    ours = {name: Task(far.moves(peer, source, scale)) for name, peer in connected.items()}
    here, there, sizes = far.pieces(source, scale)

    def readv() -> None:
        target, origin = Vector.of(here, sizes), Vector.of(there, sizes)
        while target.left:
            read_process(far.pid, origin, target)

    half = source.nbytes // 2
    block = min(1 << 20, half)

    def memcpy() -> None:
        for offset in range(0, half, block):
            ctypes.memmove(source.ctypes.data + half + offset, source.ctypes.data + offset, block)

    connection = far.dial(b"t")
    view = source.data[: scale.data_nbytes]

    def raw_tcp() -> None:
        connection.sendall(len(view).to_bytes(8, "little"))
        connection.sendall(view)
        connection.recv(1)

    bare = {READV: readv, MEMCPY: memcpy, RAW_TCP: raw_tcp}
    if not _can_read(far.pid, far.address, source):
        del bare[READV]
    return {**ours, **{name: Task(run) for name, run in bare.items()}}


def _can_read(pid: int, address: int, into: np.ndarray[Any, Any]) -> bool:
    one = np.array([1])
    try:
        return read_process(pid, Vector.of(np.array([address]), one), Vector.of(np.array([into.ctypes.data]), one)) == 1
    except OSError:
        return False


def _small(
    connected: dict[str, Peer], far: Far, source: np.ndarray[Any, Any], scale: TransferScale
) -> dict[str, tuple[float, float]]:
    """Seconds at the median and the 99th percentile of one small transfer, of ours and of bare round trips."""
    here, there = np.array([source.ctypes.data]), np.array([far.address])
    size = np.array([scale.small_nbytes])
    message = len(view := source.data[: scale.small_nbytes]).to_bytes(8, "little")
    order = FETCH.pack(os.getpid(), source.ctypes.data, scale.small_nbytes)
    tcp, vm = far.dial(b"t"), far.dial(b"v")

    def raw_tcp() -> None:
        tcp.sendall(message)
        tcp.sendall(view)
        tcp.recv(1)

    def raw_vm() -> None:
        vm.sendall(order)
        vm.recv(1)

    def ours(peer: Peer) -> Callable[[], None]:
        def move() -> None:
            if not peer.write(far.grant, here, there, size, deadline_s=DEADLINE_S).wait().ok:
                raise BenchError(f"{peer.transport}: a small transfer failed")

        return move

    bare = {RAW_TCP: raw_tcp, **({READV: raw_vm} if "cma" in connected else {})}
    calls = {**{name: ours(peer) for name, peer in connected.items()}, **bare}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(scale.small_rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: (float(np.quantile(all_, 0.5)), float(np.quantile(all_, 0.99))) for name, all_ in taken.items()}
