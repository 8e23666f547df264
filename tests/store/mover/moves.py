"""Jobs of a mover over a store whose pages land one by one, an engine's memory and a clock that is moved on by hand."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import store_client.jobs
import store_client.mover
from store_client.base import Bytes, Shard
from store_client.jobs import Load, Save
from store_client.testing import SHARD, chain, page_bytes

NBYTES = 8 * 64
KEYS = chain("a", 6)
DEADLINE_S = 1000.0
"""Of the clock of these tests, which they move on by hand."""
PATIENCE_S = 60.0


class Clock:
    """The real clock, some seconds ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class Memory:
    """An engine's memory: a row a page."""

    def __init__(self) -> None:
        self.rows = np.zeros((len(KEYS), NBYTES), dtype=np.uint8)

    def load(self, number: int, part: Shard, page: Bytes) -> None:
        assert part == SHARD
        self.rows[number] = page

    def save(self, number: int, page: Bytes) -> None:
        page[:] = self.rows[number]

    def fill(self) -> None:
        self.rows[:] = [page_bytes(key, NBYTES) for key in KEYS]

    def holds(self, count: int) -> bool:
        """The first pages, and nothing behind them."""
        right = all(np.array_equal(self.rows[i], page_bytes(KEYS[i], NBYTES)) for i in range(count))
        return right and not self.rows[count:].any()


def load(view, memory, **changes):
    return Load(**about(view) | {"copy": memory.load} | changes)


def save(view, memory, **changes):
    return Save(**about(view) | {"copy": memory.save, "parent": None} | changes)


def about(view):
    now_s = store_client.jobs.time.monotonic()
    times = {"submitted_s": now_s, "since_s": now_s, "deadline_s": DEADLINE_S}
    return {"keys": KEYS, "view": lambda: view} | times


def over(job: Any) -> bool:
    return bool(job.over.wait(PATIENCE_S))
