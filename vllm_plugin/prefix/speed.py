"""How fast this instance computes prompts: what the speed of a tier is weighed against."""

from __future__ import annotations

import time
from collections import deque

_KEPT = 0.9
"""What each sample leaves of those before it: about the last ten steps of prefill count."""


class PrefillSpeed:
    """Tokens a second, from the planning of a step to its output. Steps that compute hardly more than one token a
    request do not count.

    Args:
        least_tokens: beyond one a request: what makes a step one of prefill.
        in_flight: steps that may be planned before the output of the first of them is there, and that one.
    """

    def __init__(self, least_tokens: int, in_flight: int) -> None:
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
        fills = num_tokens >= num_requests + self._least_tokens
        self._steps.append((time.monotonic(), num_tokens if fills else 0))

    def computed(self) -> None:
        """The output of the oldest step is there, which began when the one before it was over."""
        if not self._steps:
            return
        planned_s, num_tokens = self._steps.popleft()
        began_s, self._free_s = max(planned_s, self._free_s), time.monotonic()
        self.step_s = self._free_s - began_s
        if num_tokens and self._free_s > began_s:
            self._tokens = _KEPT * self._tokens + num_tokens
            self._seconds = _KEPT * self._seconds + self._free_s - began_s
