"""What a transfer and a busy Python thread of the same process, which stands for the engine's, do to each other.

The thread's side is the p99 of steps of 5 ms over that of steps alone, the transfer's side how long it takes. On a
machine with few cores a transfer also takes processor time and memory bandwidth, so the floor is what the same transfer
does from another process, where no interpreter is shared.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

STEP_S = 0.005


@dataclass(frozen=True)
class Beside:
    """Medians over all rounds. The first two are p99 of the steps over p99 of those alone, just before."""

    here: float
    elsewhere: float
    seconds: float
    """Of one transfer from the process with the busy thread."""


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
