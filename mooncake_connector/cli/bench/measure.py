"""How figures are taken: warm up once, then several rounds in turn, and the best round counts.

The rounds of things that will be compared are interleaved, so that a neighbour's load falls on all of them alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mooncake_connector.errors import MooncakeConnectorError

Progress = Callable[[str], None]
"""Told how far a benchmark is; a line that begins with WARNING stands out."""


class BenchError(MooncakeConnectorError):
    """A benchmark that cannot run here, or whose subject gave a wrong answer."""


@dataclass(frozen=True)
class Task:
    """One thing to time. ``prepare`` runs before every round and is not timed."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] | None = None


def best_seconds(tasks: Mapping[str, Task], rounds: int) -> dict[str, float]:
    """The shortest of ``rounds`` timed runs of each task, in seconds, after one run of each that does not count."""
    best = dict.fromkeys(tasks, float("inf"))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for name, task in tasks.items():
                if task.prepare is not None:
                    task.prepare()
                start = time.perf_counter()
                task.run()
                elapsed = time.perf_counter() - start
                if number:
                    best[name] = min(best[name], elapsed)
    finally:
        if collecting:
            gc.enable()
    return best


def gigabytes_per_second(nbytes: int, seconds: float) -> float:
    """Throughput in GB/s (10^9 bytes)."""
    return nbytes / seconds / 1e9


def size_text(nbytes: int) -> str:
    """``1 MiB``, ``32 KiB``."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
