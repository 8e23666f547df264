"""What a transfer and a busy Python thread of the same process, which stands for the engine's, do to each other.

The thread's side is the p99 of steps of 5 ms over that of steps alone, the transfer's side how long it takes. On a
machine with few cores a transfer also takes processor time and memory bandwidth, so the floor is what the same transfer
does from another process, where no interpreter is shared. This module is that process, too: run with an order, it moves
the same pieces again and again until it is killed, and says so by a file once the first transfer is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import children
from bench.peers.report import Goal, Row, row
from mooncake_connector.cli.bench import processes
from mooncake_connector.cli.bench.measure import gigabytes_per_second
from mooncake_connector.cli.bench.transfer_far import DEADLINE_S, Far
from mooncake_connector.cli.bench.transfer_scale import Scale
from transfer.control.handshake import Identity
from transfer.transports.base import TransportOptions
from transfer.transports.memory import Memory
from transfer.transports.registry import make_transports

STEP_S = 0.005


@dataclass(frozen=True)
class Beside:
    """Medians over all rounds. The first two are p99 of the steps over p99 of those alone, just before."""

    here: float
    elsewhere: float
    seconds: float
    """Of one transfer from the process with the busy thread."""


def rows(found: dict[str, Beside], seconds: dict[str, float], scale: Scale) -> list[Row]:
    """What a transfer does to the thread's steps, and they to it, by transport; `seconds` are of it alone."""
    limit = "limit: beside the same between two other processes"
    figure = f"5 ms steps of a Python thread beside it, p99 over undisturbed ({limit})"
    made = []
    for name, one in found.items():
        made.append(row(f"{name}: {figure}", one.here, "times", limit=one.elsewhere, goal=Goal(at_most=1.1)))
        rates = [gigabytes_per_second(scale.data_nbytes, taken) for taken in (one.seconds, seconds[name])]
        made.append(row(f"{name}: beside such a thread (limit: alone)", rates[0], "GB/s", limit=rates[1]))
    return made


def beside(
    move: Callable[[], object],
    elsewhere: Callable[[], contextlib.AbstractContextManager[None]],
    steps: int,
    rounds: int,
) -> Beside:
    """Steps alone, beside `move` called again and again in another thread, and beside `elsewhere`, in turn."""
    count = _calibrate()
    here, there, taken = [], [], []
    for _ in range(rounds):
        alone = _p99(count, steps)
        with _kept_going(move) as seconds:
            here.append(_p99(count, steps) / alone)
        taken += seconds
        with elsewhere():
            there.append(_p99(count, steps) / alone)
    return Beside(float(np.median(here)), float(np.median(there)), float(np.median(taken)))


@contextlib.contextmanager
def _kept_going(move: Callable[[], object]) -> Iterator[list[float]]:
    """The list gets the seconds of each call."""
    over = threading.Event()
    seconds: list[float] = []

    def go_on() -> None:
        while not over.is_set():
            start = time.perf_counter()
            move()
            seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def _work(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def _calibrate() -> int:
    """Turns of `_work` that take one step on a quiet machine."""
    best = min(_timed(200_000) for _ in range(7))
    return max(1, int(200_000 * STEP_S / best))


def _timed(count: int) -> float:
    start = time.perf_counter()
    _work(count)
    return time.perf_counter() - start


def _p99(count: int, steps: int) -> float:
    return float(np.quantile([_timed(count) for _ in range(steps)], 0.99))


@contextlib.contextmanager
def moving_elsewhere(transport: str, far: Far, scale: Scale) -> Iterator[None]:
    """Meanwhile a third process moves, over this transport."""
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder, tempfile.TemporaryFile() as log:
        moved = Path(folder) / "moved"
        order = {"transport": transport, "scale": dataclasses.asdict(scale), "far": far.found, "moved": str(moved)}
        command = children.module(sys.executable, "steps", order)
        with processes.running(command, log, {**os.environ, **children.path()}, grace_s=0, leave_s=0) as process:
            what = f"{transport} between two other processes"
            processes.wait_until(moved.exists, process, log, DEADLINE_S, what)
            yield


def _move(order: dict[str, Any]) -> None:
    scale, far = Scale(**order["scale"]), Far(order["far"])
    source = np.ones(scale.memory_nbytes, dtype=np.uint8)
    memory = Memory()
    memory.register(source.ctypes.data, source.nbytes)
    with make_transports([order["transport"]], memory, TransportOptions(Identity())) as transports:
        move = far.moves(transports.connect(far.endpoints, deadline_s=DEADLINE_S), source, scale)
        move()
        Path(order["moved"]).touch()
        while True:
            move()


if __name__ == "__main__":
    _move(json.loads(sys.argv[1]))
