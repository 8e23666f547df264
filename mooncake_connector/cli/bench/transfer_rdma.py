"""The part of `bench transfer` on RDMA cards: ours and perftest's programs over the same port, in turn."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import BenchError, Progress, gigabytes_per_second, size_text
from mooncake_connector.cli.bench.report import Row
from mooncake_connector.cli.bench.transfer_far import DEADLINE_S, Far, best_rail, finish, options
from mooncake_connector.cli.bench.transfer_scale import Scale
from transfer.transports.base import TransferError
from transfer.transports.memory import Memory
from transfer.transports.rdma.rails import Rail
from transfer.transports.registry import make_transports

RDMA = "rdma"
READ_BW, READ_LAT = "ib_read_bw", "ib_read_lat"
INSTALL = "apt-get install perftest"
_ROW = re.compile(r"^[ \t]*\d+(?:[ \t]+[\d.]+){4,}", re.MULTILINE)
"""Of what perftest says, the only line that is all numbers: bytes, times, and its figures."""


@dataclass(frozen=True)
class Perftest:
    """Reads between two processes of this host over one port."""

    rail: Rail

    def gigabytes_per_second(self, nbytes: int, times: int) -> float:
        """On average, of reads of `nbytes`."""
        return self._run(READ_BW, nbytes, times)[3] * (1 << 20) / 1e9

    def latency_s(self, nbytes: int, times: int) -> tuple[float, float]:
        """The typical one, and the 99th percentile."""
        figures = self._run(READ_LAT, nbytes, times)
        return figures[4] / 1e6, figures[7] / 1e6

    def _run(self, program: str, nbytes: int, times: int) -> list[float]:
        rail, (port,) = self.rail, processes.free_ports(1)
        where = ["-d", rail.device, "-i", str(rail.port), "-x", str(rail.gid_index), "-p", str(port)]
        command = [program, "-F", *where, "-s", str(nbytes), "-n", str(times)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as serving:
            try:
                return _figures(program, _answered([*command, "127.0.0.1"], serving))
            finally:
                serving.kill()


def _answered(command: Sequence[str], serving: subprocess.Popen[bytes]) -> str:
    """What the asking side says, once the other one listens. Raises BenchError."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * DEADLINE_S)
        if done.returncode == 0:
            return done.stdout
        if serving.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
        time.sleep(0.1)


def _figures(program: str, said: str) -> list[float]:
    found = _ROW.search(said)
    if found is None:
        raise BenchError(f"{program} said no figures: {said!r}")
    return [float(word) for word in found.group().split()]


def measure_rdma(source: np.ndarray[Any, Any], far: Far, scale: Scale, say: Progress) -> list[Row]:
    """Of the transport `rdma`, where the other process offers it."""
    if RDMA not in far.endpoints:
        return []
    rail = best_rail()
    perftest = Perftest(rail) if rail is not None and shutil.which(READ_BW) and shutil.which(READ_LAT) else None
    if perftest is None:
        say(f"WARNING: {RDMA} has no limit beside it, perftest is missing: {INSTALL}")
    memory = Memory()
    memory.register(source.ctypes.data, source.nbytes)
    try:
        with make_transports([RDMA], memory, options()) as transports:
            peer = transports.connect({RDMA: far.endpoints[RDMA]}, deadline_s=DEADLINE_S)
            rows = []
            for pieces in (scale, scale.large):
                rows += moving_rows(far.moves(peer, source, pieces), far, perftest, pieces)
            one = np.array([source.ctypes.data]), np.array([far.address]), np.array([scale.small_nbytes])
            rows += small_rows(
                lambda: finish(peer, peer.write(far.grant, *one, deadline_s=DEADLINE_S)), perftest, scale
            )
            return rows
    except TransferError as error:
        say(f"WARNING: {RDMA} is left out: {error}")
        return []


def moving_rows(move: Callable[[], None], far: Far, perftest: Perftest | None, pieces: Scale) -> list[Row]:
    """The best round of each, and what processor time ours took of both processes, outside of the kernel."""
    move()
    ours, bare, busy_s = [], [], 0.0
    for _ in range(pieces.rounds):
        used_s, start = _user_s(far.pid), time.perf_counter()
        move()
        ours.append(gigabytes_per_second(pieces.data_nbytes, time.perf_counter() - start))
        busy_s += _user_s(far.pid) - used_s
        if perftest is not None:
            bare.append(perftest.gigabytes_per_second(pieces.piece_nbytes, max(5, pieces.pieces)))
    size = size_text(pieces.piece_nbytes)
    spent = busy_s / (pieces.rounds * pieces.data_nbytes) * (1 << 30)
    shape = f"{pieces.pieces:,} x {size}, scattered to scattered"
    return [
        Row(f"{RDMA}: {shape} (limit: {READ_BW} -s {pieces.piece_nbytes})", max(ours), "GB/s", max(bare, default=None)),
        Row(f"{RDMA}: the same, processor time of both processes outside of the kernel", spent, "s/GiB"),
    ]


def small_rows(call: Callable[[], None], perftest: Perftest | None, scale: Scale) -> list[Row]:
    taken = []
    for _ in range(scale.small_rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    bare = perftest.latency_s(scale.small_nbytes, scale.small_rounds) if perftest is not None else (None, None)
    figure = f"{RDMA}: one transfer of {size_text(scale.small_nbytes)}"
    quantiles: Mapping[str, float] = {"p50": 0.5, "p99": 0.99}
    return [
        Row(f"{figure}, {name} (limit: {READ_LAT})", float(np.quantile(taken, at)) * 1e6, "us", limit and limit * 1e6)
        for (name, at), limit in zip(quantiles.items(), bare, strict=True)
    ]


def _user_s(pid: int) -> float:
    """Processor time of this process and of another one, outside of the kernel."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return os.times().user + int(after_name[11]) / os.sysconf("SC_CLK_TCK")
