"""Counts of this process: in the file that says that it lives, so that they reach the pool though it never writes.

A put hands them over to the pool; those of a process that was killed are taken over with its file.
"""

import threading

import numpy as np

from store_client.embedded.rows import U64
from store_client.embedded.table import CAUSES, COUNTERS

NAMES = (*COUNTERS, *CAUSES)
_INDEX = {name: i for i, name in enumerate(NAMES)}
_MASK = 0xFFFFFFFFFFFFFFFF


class Counters:
    """Named counts in `page`, memory that other processes may read at any time."""

    def __init__(self, page: U64) -> None:
        self._lock = threading.Lock()
        self._page = page

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._page[_INDEX[name]] = (int(self._page[_INDEX[name]]) + count) & _MASK

    def take(self) -> dict[str, int]:
        """The counts, which begin at zero again."""
        with self._lock:
            counts = as_counts(self._page)
            self._page[: len(NAMES)] = 0
        return counts

    def move(self, page: U64) -> None:
        """Go on in other memory."""
        with self._lock:
            page[: len(NAMES)] = self._page[: len(NAMES)]
            self._page = page

    def abandon_in_child(self) -> None:
        """After a fork: the page is the parent's."""
        self._lock = threading.Lock()
        self._page = np.zeros(len(NAMES), dtype=np.uint64)


def as_counts(page: U64) -> dict[str, int]:
    return {name: count for name, count in zip(NAMES, page.tolist(), strict=False) if count}
