"""How fast a tier is, as measured, and whether fetching from it beats computing."""

from __future__ import annotations

import threading

_WEIGHT = 0.2
"""Of the newest measurement."""
_KEEPS_S = 60.0
"""An older measurement says nothing any more: the next pages are fetched whatever it was, and measured."""


class Speed:
    """Latency and bandwidth of one tier, as moving averages. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measured_at = float("-inf")
        self.latency_s = 0.0
        self.bandwidth: float | None = None
        """Bytes a second of all reads together that are under way at once; None: not measured yet."""

    def answered(self, seconds: float) -> None:
        """A question, which moves no pages, took so long."""
        with self._lock:
            self.latency_s += (seconds - self.latency_s) * (_WEIGHT if self.latency_s else 1.0)

    def read(self, nbytes: int, seconds: float, at_once: float, now: float) -> None:
        """`nbytes` came in `seconds`, while `at_once` reads (this one counted) were under way."""
        with self._lock:
            moving_s = max(seconds - self.latency_s, seconds / 10, 1e-9)
            measured = nbytes * max(1.0, at_once) / moving_s
            stale = self.bandwidth is None or now - self._measured_at > _KEEPS_S
            self.bandwidth = measured if stale else _mean(self.bandwidth or measured, measured)
            self._measured_at = now

    def expected_s(self, nbytes: int, now: float) -> float | None:
        """Seconds until so many bytes would be here, those counted that are waited for already; None: not known."""
        with self._lock:
            if self.bandwidth is None or now - self._measured_at > _KEEPS_S:
                return None
            return self.latency_s + nbytes / self.bandwidth


def _mean(known: float, measured: float) -> float:
    """The average of times, not of speeds: one read that was slow costs what it costs."""
    return 1.0 / ((1 - _WEIGHT) / known + _WEIGHT / measured)


def is_worth_it(expected_s: float | None, tokens: int, prefill_tokens_s: float | None) -> bool:
    """Whether to fetch what holds so many tokens. What is not known is worth a try."""
    return expected_s is None or not prefill_tokens_s or expected_s <= tokens / prefill_tokens_s
