"""`make bench NAME=transports`: every transport that works here by the same figures, in one run.

One after the other; a transport on a library takes turns with the library alone, which reads the same pieces, and with
that beside a thread that copies as much, its limit. A busy Python thread runs in the sending process, and in the
receiving one; in a third process it is the limit of these rows.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from bench.peers import steps
from bench.peers.report import Comparison, Goal, Row, row
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress, gigabytes_per_second, size_text
from mooncake_connector.cli.bench.transfer import ALONE, certificate
from mooncake_connector.cli.bench.transfer_far import DEADLINE_S, TLS, Far, far_process
from mooncake_connector.cli.bench.transfer_libraries import LIBRARIES, Alone
from mooncake_connector.cli.bench.transfer_scale import Scale
from mooncake_connector.deploy.keeper import children_of
from transfer.control.handshake import Identity
from transfer.transports.base import TransferError, TransportOptions
from transfer.transports.memory import Memory
from transfer.transports.registry import make_transports, serving
from transfer.transports.tls import Tls

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_GIB = 1 << 30
COPYING = " beside a copy"
SMALL, SCATTERED, LARGE = "small", "scattered", "large"


@dataclass(frozen=True)
class TransportScale:
    """How much a run does."""

    move: Scale = Scale()  # noqa: RUF009 it is frozen
    rounds: int = 7
    beside_rounds: int = 5
    small_rounds: int = 500
    steps: int = 200


QUICK = TransportScale(Scale(pieces=64), rounds=1, beside_rounds=1, small_rounds=5, steps=4)

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds of one transport, or of a library alone."""

    small_s: tuple[float, float]
    """The 99th percentile as well."""
    scattered_s: float
    large_s: float
    cpu_s: float
    """Of both processes and those that do TLS for them, for all of the large pieces."""


@dataclass(frozen=True)
class Beside:
    """With a busy Python thread."""

    step: float
    """p99 of its steps beside the transfer over p99 alone, in the sending process."""
    sending: float
    receiving: float
    elsewhere: float
    """The rate with it in the sending, the receiving or a third process over that without it just before, in large
    pieces. With the third one nothing but the processor is missing."""


def run(scale: TransportScale, progress: Progress) -> Comparison:
    """Measure. A transport that does not work here is left out with a warning."""
    machine, versions = describe_machine(Path(tempfile.gettempdir())), describe_versions()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        tls = certificate(Path(folder), progress)
        with far_process(scale.move.memory_nbytes, tls) as far:
            for name in serving(hosts=["127.0.0.1"]):
                if name not in far.endpoints:
                    progress(f"WARNING: {name} is left out: the other process cannot offer it")
            for name in far.endpoints:
                progress(name)
                try:
                    rows += _measure(name, far, Tls(**tls) if tls and name == TLS else None, scale)
                except (TransferError, BenchError) as error:
                    progress(f"WARNING: {name} is left out: {error}{far.end()}")
    return Comparison(machine, versions, rows)


def _measure(name: str, far: Far, tls: Tls | None, scale: TransportScale) -> list[Row]:
    with contextlib.ExitStack() as stack:
        source = np.ones(scale.move.memory_nbytes, dtype=np.uint8)
        memory = Memory()
        memory.register(source.ctypes.data, source.nbytes)
        kind = "tcp" if name == TLS else name
        transports = stack.enter_context(make_transports([kind], memory, TransportOptions(Identity(), tls=tls)))
        peer = transports.connect({kind: far.endpoints[name]}, deadline_s=DEADLINE_S)
        calls = {name: _calls(scale.move, lambda pieces: far.moves(peer, source, pieces))}
        if name in LIBRARIES:
            alone = stack.enter_context(Alone(name, source, far.dial(b"l")))
            calls[name + ALONE] = _calls(scale.move, alone.reads)
            calls[name + COPYING] = _calls(scale.move, functools.partial(alone.reads, copies=True))
        found = _in_turn(calls, far.pid, scale)
        return rows(name, found, _beside(calls[name][LARGE], far, scale), scale.move)


def _calls(scale: Scale, moves: Callable[[Scale], Call]) -> dict[str, Call]:
    small = Scale(pieces=1, piece_nbytes=scale.small_nbytes)
    return {SMALL: moves(small), SCATTERED: moves(scale), LARGE: moves(scale.large)}


def _in_turn(calls: Mapping[str, Mapping[str, Call]], pid: int, scale: TransportScale) -> dict[str, Figures]:
    seconds: dict[tuple[str, str], list[float]] = {}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    counts = {SMALL: scale.small_rounds, SCATTERED: scale.rounds, LARGE: scale.rounds}
    for what, count in counts.items():
        for number in range(count + 1):
            for name, kinds in calls.items():
                before, start = _cpu_s(pid), time.perf_counter()
                kinds[what]()
                taken = time.perf_counter() - start
                if number:  # the first one warms up
                    seconds.setdefault((name, what), []).append(taken)
                    if what == LARGE:
                        cpu[name].append(_cpu_s(pid) - before)
    return {
        name: Figures(
            (_quantile(seconds[name, SMALL], 0.5), _quantile(seconds[name, SMALL], 0.99)),
            _quantile(seconds[name, SCATTERED], 0.5),
            _quantile(seconds[name, LARGE], 0.5),
            sum(cpu[name]) / scale.rounds,
        )
        for name in calls
    }


def _cpu_s(pid: int) -> float:
    """Of this process and the other one, and of what these have started: what does TLS for them."""
    ticks = 0
    for one in {pid} | children_of({pid, os.getpid()}):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks * _TICK_S


def _quantile(values: list[float], quantile: float) -> float:
    return float(np.quantile(values, quantile))


def _beside(move: Call, far: Far, scale: TransportScale) -> Beside:
    here = steps.beside(move, contextlib.nullcontext, scale.steps, rounds=3)
    places = far.busy_here, far.busy_there, _busy_elsewhere
    ratios: list[list[float]] = [[] for _ in places]
    for _ in range(scale.beside_rounds):
        alone = _second_s(move)
        for busy, found in zip(places, ratios, strict=True):
            with busy():
                found.append(alone / _second_s(move))
    return Beside(here.here, *(_quantile(found, 0.5) for found in ratios))


@contextlib.contextmanager
def _busy_elsewhere() -> Iterator[None]:
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            child.stdout.readline()
            yield
        finally:
            child.kill()


def _second_s(move: Call) -> float:
    """Of the second of two: the first one may have found out that a thread is busy."""
    move()
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def rows(name: str, found: Mapping[str, Figures], beside: Beside, scale: Scale) -> list[Row]:
    """Of one transport; the peer is the library alone, the limit that one beside a thread that copies as much."""
    one, alone, copying = found[name], found.get(name + ALONE), found.get(name + COPYING)

    def rate(seconds: float) -> float:
        return gigabytes_per_second(scale.data_nbytes, seconds)

    at_least = Goal(at_least_of_peer=0.9) if alone else None
    of_all, small = _GIB / scale.data_nbytes, size_text(scale.small_nbytes)
    half = Goal(at_least=0.5) if name in ("tcp", TLS) else None
    return [
        row(f"{name}: {small}, p50", one.small_s[0] * 1e6, "us", peer=alone and alone.small_s[0] * 1e6),
        row(f"{name}: {small}, p99", one.small_s[1] * 1e6, "us", peer=alone and alone.small_s[1] * 1e6),
        row(
            f"{name}: {size_text(scale.piece_nbytes)} scattered", rate(one.scattered_s), "GB/s",
            limit=copying and rate(copying.scattered_s), peer=alone and rate(alone.scattered_s), goal=at_least,
        ),
        row(
            f"{name}: 1 MiB", rate(one.large_s), "GB/s",
            limit=copying and rate(copying.large_s), peer=alone and rate(alone.large_s), goal=at_least,
        ),
        row(
            f"{name}: processor time", one.cpu_s * of_all, "s/GiB",
            limit=copying and copying.cpu_s * of_all, peer=alone and alone.cpu_s * of_all,
        ),
        row(f"{name}: 5 ms steps of a Python thread beside it, p99 over undisturbed", beside.step, "times"),
        row(
            f"{name}: its rate with one at the sender, over that without", beside.sending, "times",
            limit=beside.elsewhere, goal=half,
        ),
        row(
            f"{name}: its rate with one at the receiver, over that without", beside.receiving, "times",
            limit=beside.elsewhere, goal=half,
        ),
    ]  # fmt: skip
