"""What the device and its link do by themselves: the same bytes as plain copies from and to page-locked memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes a second: `up` to the device, `down` from it, `both` ways at once in sum. The best of some rounds."""

    up: float
    down: float
    both: float


def measure(device: torch.device, page_nbytes: int, num_pages: int) -> Limits:
    """Copy so many pages each way, one by one, on a stream for each way."""
    shape = num_pages, page_nbytes
    host = [torch.zeros(shape, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(ways: tuple[int, ...]) -> float:
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for way in ways:
            source, target = (host[0], there[0]) if way == 0 else (there[1], host[1])
            with torch.cuda.stream(streams[way]):
                for page in range(num_pages):
                    target[page].copy_(source[page], non_blocking=True)
        for way in ways:
            streams[way].synchronize()
        return time.perf_counter() - started

    def best(*ways: int) -> float:
        return min(copy(ways) for _ in range(ROUNDS + 1))

    nbytes = num_pages * page_nbytes
    return Limits(nbytes / best(0), nbytes / best(1), 2 * nbytes / best(0, 1))


def milliseconds(device: torch.device, work: Callable[[], None], rounds: int) -> list[float]:
    """How long the device takes for each of some rounds on the current stream, after one that does not count."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    work()
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(marks)]
