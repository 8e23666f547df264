"""How fast this instance computes prompts: what hits save, and what the speed of a tier is weighed against."""

from __future__ import annotations

import time
from collections import deque

_KEPT = 0.9
"""What each sample leaves of those before it: about the last ten steps of prefill count."""


class PrefillSpeed:
    """Tokens a second, from the planning of a step to its output. Steps that compute hardly more than one token a
    request do not count. An adapter calls `planned` and `computed`, or `took` alone.

    Args:
        least_tokens: beyond one a request: what makes a step one of prefill.
        in_flight: steps that may be planned before the output of the first of them is there, and that one.
    """

    def __init__(self, least_tokens: int, in_flight: int = 1) -> None:
        self._least_tokens = least_tokens
        self._steps: deque[tuple[float, int]] = deque(maxlen=in_flight)
        self._tokens = self._seconds = 0.0
        self._free_s = 0.0
        self.step_s = 0.0
        """Seconds of the last step, whatever it computed; 0 before the first one."""

    @property
    def tokens_s(self) -> float | None:
        """None until something was measured."""
        return self._tokens / self._seconds if self._seconds else None

    def planned(self, num_tokens: int, num_requests: int) -> None:
        """A step was planned, of so many tokens."""
        self._steps.append((time.monotonic(), self._filling(num_tokens, num_requests)))

    def computed(self) -> None:
        """The output of the oldest step is there, which began when the one before it was over."""
        if self._steps:
            self._count(*self._steps.popleft())

    def took(self, seconds: float, num_tokens: int, num_requests: int) -> None:
        """A step took so long, as its engine says."""
        self._add(seconds, self._filling(num_tokens, num_requests))

    def _filling(self, num_tokens: int, num_requests: int) -> int:
        """0 where the step is none of prefill."""
        return num_tokens if num_tokens >= num_requests + self._least_tokens else 0

    def _count(self, planned_s: float, num_tokens: int) -> None:
        began_s, self._free_s = max(planned_s, self._free_s), time.monotonic()
        self._add(self._free_s - began_s, num_tokens)

    def _add(self, seconds: float, num_tokens: int) -> None:
        self.step_s = seconds
        if num_tokens and seconds > 0:
            self._tokens = _KEPT * self._tokens + num_tokens
            self._seconds = _KEPT * self._seconds + seconds
