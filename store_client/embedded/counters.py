"""Counts of this process that wait to be handed to the pool, which takes them under its write lock."""

import threading


class Counters:
    """Named counts; `take` empties them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] = self._counts.get(name, 0) + count

    def peek(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def take(self) -> dict[str, int]:
        with self._lock:
            counts, self._counts = self._counts, {}
            return counts
