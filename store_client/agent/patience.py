"""For how long the agent's first word on a prompt is worth waiting for.

The wait is lost where no tier has anything of the prompt, and saves computing what some tier has. So it may cost a part
of what it brings on average: the share of pages asked for lately that tiers had, of the time that computing them takes.
Where tiers bring nothing, it is next to nothing.
"""

from __future__ import annotations

import threading

LEAST_S = 0.002
"""What any prompt may wait."""
_MOST_S = 0.25
"""A word that takes longer is not waited for, whatever it may bring."""
_SPENT = 0.25
"""Of what waiting brings, what it may cost."""
_KEPT = 0.98
"""What each ask leaves of those before it: about the last fifty count."""


class Patience:
    """What was asked for lately, and how much of it tiers had. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = self._found = 0.0

    def heard(self, asked: int, found: int) -> None:
        """It is settled how many of so many pages come from tiers."""
        with self._lock:
            self._asked = _KEPT * self._asked + asked
            self._found = _KEPT * self._found + found

    def wait_s(self, prefill_s: float | None) -> float:
        """Seconds to wait for the first word on pages that take `prefill_s` to compute; None: nobody knows."""
        found, asked = self._found, self._asked
        if prefill_s is None or not asked:
            return LEAST_S
        return max(LEAST_S, min(_SPENT * found / asked * prefill_s, _MOST_S))
