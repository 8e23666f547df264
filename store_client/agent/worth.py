"""How fast a tier is, as measured, and whether fetching from it beats computing."""

from __future__ import annotations

import threading

_WEIGHT = 0.2
"""Of the newest measurement."""
_KEEPS_S = 60.0
"""An older measurement says nothing any more: the next pages are fetched whatever it was, and measured."""
_SEVERAL = 4.0
"""So many times slower than before is sudden: this process may have stood still, and the tier be as fast as ever."""
_DOUBTED_S = 1.0
"""A sudden measurement is believed for so long, and for twice as long each time that there is another soon."""


class Speed:
    """Latency and bandwidth of one tier, as moving averages. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measured_at = self._doubted_at = float("-inf")
        self._keeps_s = _KEEPS_S
        self._doubt_s = _DOUBTED_S
        self.latency_s = 0.0
        self.bandwidth: float | None = None
        """Bytes a second of all reads together that are under way at once; None: not measured yet."""

    def answered(self, seconds: float) -> None:
        """A question, which moves no pages, took so long."""
        with self._lock:
            if self.latency_s:
                self.latency_s += (min(seconds, _SEVERAL * self.latency_s) - self.latency_s) * _WEIGHT
            else:
                self.latency_s = seconds

    def read(self, nbytes: int, seconds: float, at_once: float, now: float) -> None:
        """`nbytes` came in `seconds`, while `at_once` reads (this one counted) were under way."""
        with self._lock:
            if now - seconds < self._doubted_at:
                return  # it was under way with the one that is doubted, and slow for the same reason
            moving_s = max(seconds - self.latency_s, seconds / 10, 1e-9)
            measured, known = nbytes * max(1.0, at_once) / moving_s, self.bandwidth
            sudden = known is not None and measured < known / _SEVERAL
            decides = known is None or self._is_stale(now) or (self._keeps_s < _KEEPS_S and not sudden)
            self.bandwidth = measured if known is None or decides else _mean(known, measured)
            self._keeps_s = self._doubt(now) if sudden else _KEEPS_S
            self._measured_at = now

    def _doubt(self, now: float) -> float:
        """For how long it is believed."""
        again = now - self._doubted_at < 2 * _KEEPS_S
        self._doubt_s = min(2 * self._doubt_s, _KEEPS_S) if again else _DOUBTED_S
        self._doubted_at = now
        return self._doubt_s

    def _is_stale(self, now: float) -> bool:
        return now - self._measured_at > self._keeps_s

    def expected_s(self, nbytes: int, now: float) -> float | None:
        """Seconds until so many bytes would be here, those counted that are waited for already; None: not known."""
        with self._lock:
            if self.bandwidth is None or self._is_stale(now):
                return None
            return self.latency_s + nbytes / self.bandwidth


def _mean(known: float, measured: float) -> float:
    """The average of times, not of speeds: one read that was slow costs what it costs."""
    return 1.0 / ((1 - _WEIGHT) / known + _WEIGHT / measured)


def is_worth_it(expected_s: float | None, tokens: int, prefill_tokens_s: float | None) -> bool:
    """Whether to fetch what holds so many tokens. What is not known is worth a try."""
    return expected_s is None or not prefill_tokens_s or expected_s <= tokens / prefill_tokens_s
