"""Circuit breaker: a store that failed is left alone for a while, one that hangs until it does no more."""

from __future__ import annotations

import time

from sglang_backend.errand import Errand

PAUSE_S = 5.0


class Breaker:
    """Open (nothing passes) for `PAUSE_S` after each trip. May be used from any thread."""

    def __init__(self) -> None:
        self._closed_again_s = 0.0
        self._stuck: Errand | None = None

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._closed_again_s or (self._stuck is not None and self._stuck.is_under_way)

    def trip(self, stuck: Errand | None = None) -> None:
        """`stuck` is a call that was given up: as long as it is under way, another one would hang as well."""
        self._closed_again_s = time.monotonic() + PAUSE_S
        self._stuck = stuck
