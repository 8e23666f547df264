"""`bench transfer`: our transports between two processes of this host, beside what the machine can do without them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import Progress, Task, best_seconds, gigabytes_per_second, size_text
from mooncake_connector.cli.bench.report import Report, Row
from mooncake_connector.cli.bench.store import MEMCPY, memcpy_task
from mooncake_connector.cli.bench.transfer_far import DEADLINE_S, FETCH, TLS, Far, far_process, finish
from mooncake_connector.cli.bench.transfer_libraries import LIBRARIES, Alone
from mooncake_connector.cli.bench.transfer_rdma import RDMA, measure_rdma
from mooncake_connector.cli.bench.transfer_scale import Scale
from transfer.control.handshake import Identity
from transfer.transports.base import Peer, TransferError, TransportOptions, Unavailable
from transfer.transports.memory import Memory
from transfer.transports.registry import make_transports, names, serving
from transfer.transports.tls import Tls
from transfer.transports.vectors import Vector, read_process

READV, RAW_TCP = "process_vm_readv", "sendall/recv_into"
LIMITS = {"cma": READV, "shm": MEMCPY, "tcp": RAW_TCP, TLS: "tcp"}
ALONE, LARGE = " alone", ", 1 MiB"
"""What follows the name of a library: without us, and in large pieces."""
SMALL_LIMITS = {"cma": READV, "shm": RAW_TCP, "tcp": RAW_TCP}

Quantiles = dict[str, tuple[float, float]]
"""Seconds at the median and the 99th percentile."""


@dataclass(frozen=True)
class Ends:
    """Two processes: this one with `source`, the other one, and the connections between them."""

    source: np.ndarray[Any, Any]
    far: Far
    peers: dict[str, Peer]

    def small_peers(self) -> dict[str, Peer]:
        return {name: peer for name, peer in self.peers.items() if name in SMALL_LIMITS}


def run(scale: Scale, progress: Progress, only: Sequence[str] = ()) -> Report:
    """Measure all transports, or those of these names. One that does not work here is left out with a warning."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    seconds, quantiles = dict[str, float](), Quantiles()
    with connected(scale, progress, only) as ends:
        if ends.peers:
            progress("scattered pieces: ours, process_vm_readv, memcpy and bare TCP in turn")
            seconds |= best_seconds(moving_tasks(ends, scale), scale.rounds)
            progress("one small transfer: ours and bare round trips in turn")
            quantiles = measure_small(ends, scale)
        progress("transports on libraries and on cards, and these alone, in turn")
        seconds |= measure_libraries(ends, scale, progress)
        over_cards = measure_rdma(ends.source, ends.far, scale, progress)
    return Report(machine, versions, [*moving_rows(seconds, scale), *small_rows(quantiles, scale), *over_cards])


def moving_rows(seconds: Mapping[str, float], scale: Scale) -> list[Row]:
    """Scattered pieces to scattered places, by transport."""
    shape = f"{scale.pieces:,} x {size_text(scale.piece_nbytes)}, scattered to scattered"
    rates = {name: gigabytes_per_second(scale.data_nbytes, taken) for name, taken in seconds.items()}
    figures = {name: f"{name} (limit: tcp without)" if name == TLS else f"{name}: {shape}" for name in LIMITS}
    rows = [
        Row(figures[name], rates[name], "GB/s", rates.get(limit)) for name, limit in LIMITS.items() if name in rates
    ]
    for name in LIBRARIES:
        for kind, what in (("", shape), (LARGE, f"{scale.large.pieces:,} x 1 MiB, scattered to scattered")):
            if name + kind in rates:
                figure = f"{name}: {what} (limit: the library alone)"
                rows.append(Row(figure, rates[name + kind], "GB/s", rates.get(name + ALONE + kind)))
    return rows


def small_rows(quantiles: Quantiles, scale: Scale) -> list[Row]:
    """One small transfer beside the bare round trip of its kind, at the median and the 99th percentile."""
    rows = []
    for name, bare in SMALL_LIMITS.items():
        if name in quantiles:
            for label, value, limit in zip(("p50", "p99"), quantiles[name], quantiles[bare], strict=True):
                figure = f"{name}: one transfer of {size_text(scale.small_nbytes)}, {label} (limit: {bare})"
                rows.append(Row(figure, value * 1e6, "us", limit * 1e6))
    return rows


@contextlib.contextmanager
def connected(scale: Scale, progress: Progress, only: Sequence[str] = ()) -> Iterator[Ends]:
    """Start the other process, and connect every transport that works here to it, or those of these names."""
    only = only or names()
    source = np.ones(scale.memory_nbytes, dtype=np.uint8)
    memory = Memory()
    memory.register(source.ctypes.data, source.nbytes)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tls = certificate(folder, progress) if "tcp" in only else None
        far = stack.enter_context(far_process(scale.memory_nbytes, tls, only))
        peers = {}
        for name in far.endpoints:
            if name in LIBRARIES or name == RDMA:  # measured beside a peer, connected meanwhile
                continue
            kind, security = ("tcp", Tls(**tls)) if name == TLS and tls else (name, None)
            options = TransportOptions(Identity(), tls=security)
            transports = stack.enter_context(make_transports([kind], memory, options))
            try:
                peers[name] = transports.connect({kind: far.endpoints[name]}, deadline_s=DEADLINE_S)
            except Unavailable as error:
                progress(f"WARNING: {name} is left out: {error}")
        for name in serving(only, hosts=["127.0.0.1"]):
            if name not in far.endpoints:
                progress(f"WARNING: {name} is left out: the other process cannot offer it")
        yield Ends(source, far, peers)


def measure_libraries(ends: Ends, scale: Scale, progress: Progress) -> dict[str, float]:
    """Best seconds of each transport on a library, and of the library alone, in turn; connected only meanwhile."""
    source, far, tasks = ends.source, ends.far, {}
    memory = Memory()
    memory.register(source.ctypes.data, source.nbytes)
    with contextlib.ExitStack() as stack:
        for name in LIBRARIES:
            if name not in far.endpoints:
                continue
            try:
                transports = stack.enter_context(make_transports([name], memory, TransportOptions(Identity())))
                peer = transports.connect({name: far.endpoints[name]}, deadline_s=DEADLINE_S)
                alone = stack.enter_context(Alone(name, source, far.dial(b"l")))
            except TransferError as error:
                progress(f"WARNING: {name} is left out: {error}")
                continue
            for kind, pieces in (("", scale), (LARGE, scale.large)):
                tasks[name + kind] = Task(far.moves(peer, source, pieces))
                tasks[name + ALONE + kind] = Task(alone.reads(pieces))
        return best_seconds(tasks, scale.rounds)


def certificate(folder: Path, progress: Progress) -> dict[str, str] | None:
    """Arguments of `Tls` for a certificate that signs itself; None, and a warning, without openssl."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    own, key = str(folder / "own.pem"), str(folder / "key.pem")
    try:
        subprocess.run([*make, "-subj", "/CN=bench", "-keyout", key, "-out", own], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        progress(f"WARNING: {TLS} is left out, its certificate is made with openssl: {error}")
        return None
    return {"certificate": own, "key": key, "authority": own}


def moving_tasks(ends: Ends, scale: Scale) -> dict[str, Task]:
    """Every transport and every limit, each moving all pieces once."""
    source, far = ends.source, ends.far
    ours = {name: Task(far.moves(peer, source, scale)) for name, peer in ends.peers.items()}
    here, there, sizes = far.pieces(source, scale)

    def readv() -> None:
        target, origin = Vector.of(here, sizes), Vector.of(there, sizes)
        while target.left:
            read_process(far.pid, origin, target)

    half = source.nbytes // 2
    connection = far.dial(b"t")
    view = source.data[: scale.data_nbytes]

    def raw_tcp() -> None:
        connection.sendall(len(view).to_bytes(8, "little"))
        connection.sendall(view)
        connection.recv(1)

    bare = {RAW_TCP: Task(raw_tcp), MEMCPY: memcpy_task(source[:half], source[half:], min(1 << 20, half))}
    if _can_read(far, source):
        bare[READV] = Task(readv)
    return {**ours, **bare}


def _can_read(far: Far, into: np.ndarray[Any, Any]) -> bool:
    one = np.array([1])
    origin, target = Vector.of(np.array([far.address]), one), Vector.of(np.array([into.ctypes.data]), one)
    try:
        return read_process(far.pid, origin, target) == 1
    except OSError:
        return False


def measure_small(ends: Ends, scale: Scale) -> dict[str, tuple[float, float]]:
    """One small transfer, of ours and of bare round trips, in turn."""
    source, far = ends.source, ends.far
    here, there, size = np.array([source.ctypes.data]), np.array([far.address]), np.array([scale.small_nbytes])
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
        return lambda: finish(peer, peer.write(far.grant, here, there, size, deadline_s=DEADLINE_S))

    calls = {name: ours(peer) for name, peer in ends.small_peers().items()}
    calls |= {RAW_TCP: raw_tcp, **({READV: raw_vm} if "cma" in calls else {})}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(scale.small_rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: (float(np.quantile(all_, 0.5)), float(np.quantile(all_, 0.99))) for name, all_ in taken.items()}
