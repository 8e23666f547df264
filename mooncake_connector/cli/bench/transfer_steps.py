"""What a transfer does to a Python thread beside it, which stands for the engine's: p99 of steps of 5 ms.

On a machine with few cores a transfer also takes processor time and memory bandwidth. The floor is what copying in
another process does, where no interpreter is shared.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

STEP_S = 0.005
ALONE, FLOOR = "alone", "memcpy in another process"
_MEMCPY = """
import ctypes
half = 64 << 20
memory = ctypes.create_string_buffer(b"1" * 2 * half, 2 * half)
address = ctypes.addressof(memory)
print(flush=True)
while True:
    ctypes.memmove(address, address + half, half)
"""


def ratios(moves: Mapping[str, Callable[[], object]], steps: int, rounds: int) -> dict[str, float]:
    """p99 of the steps beside each of `moves`, called again and again in another thread, over p99 of steps alone.

    Also `FLOOR`. Rounds are interleaved and the best of each counts: a neighbour's load is not what is measured.
    """
    count = _calibrate()
    beside: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        ALONE: contextlib.nullcontext,
        FLOOR: _memcpy,
        **{name: functools.partial(_kept_going, move) for name, move in moves.items()},
    }
    best = dict.fromkeys(beside, float("inf"))
    for _ in range(rounds):
        for name, start in beside.items():
            with start():
                best[name] = min(best[name], _p99(count, steps))
    alone = best.pop(ALONE)
    return {name: p99 / alone for name, p99 in best.items()}


@contextlib.contextmanager
def _kept_going(move: Callable[[], object]) -> Iterator[None]:
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            move()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _memcpy() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", _MEMCPY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            yield
        finally:
            process.kill()


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
