"""Circuit breaker: a store that failed is left alone for a while."""

from __future__ import annotations

import time

PAUSE_S = 5.0


class Breaker:
    """Open (nothing passes) for `PAUSE_S` after each trip. May be used from any thread."""

    def __init__(self) -> None:
        self._closed_again_s = 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._closed_again_s

    def trip(self) -> None:
        self._closed_again_s = time.monotonic() + PAUSE_S
