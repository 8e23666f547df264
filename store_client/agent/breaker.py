"""When a tier is left alone: after failures, for a while that grows, until one call was tried and went well."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LASTING_PAUSE_S = 300.0
"""Where trying again will not help before a person has done something."""
_IN_A_ROW = {"timeout": 3, "error": 3}
"""So many failures of a cause open it; one of any other cause does."""


class Breaker:
    """State of one way to use a tier, its reads or its writes. Times are seconds of one monotonic clock.

    Closed: calls are made. Open: none is, until the pause is over. Then one call is tried, and decides.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._lock = threading.Lock()
        self._in_a_row: dict[str, int] = {}
        self._opened = 0
        """Times in a row without a call that went well."""
        self._until: float | None = None
        self._trying = False
        self.cause = ""
        """Why it is open."""

    def allows(self, now: float) -> bool:
        """Whether a call would be let through. Changes nothing."""
        with self._lock:
            return self._until is None or (now >= self._until and not self._trying)

    def enter(self, now: float) -> bool:
        """Ask to make a call; who is let through says `succeed` or `fail` afterwards."""
        with self._lock:
            if self._until is None:
                return True
            if now < self._until or self._trying:
                return False
            self._trying = True
            return True

    def succeed(self) -> None:
        with self._lock:
            self._until, self._trying, self._opened, self.cause = None, False, 0, ""
            self._in_a_row.clear()

    def leave(self) -> None:
        """The call says nothing of the tier: it had too little time."""
        with self._lock:
            self._trying = False

    def fail(self, cause: str, now: float, *, lasting: bool = False) -> bool:
        """A call failed; True where that opened it."""
        with self._lock:
            count = self._in_a_row[cause] = self._in_a_row.get(cause, 0) + 1
            was_open = self._until is not None
            if not was_open and not lasting and count < _IN_A_ROW.get(cause, 1):
                return False
            if was_open and not self._trying:  # calls that were under way when it opened say nothing new
                return False
            longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._opened, 10))
            pause_s = LASTING_PAUSE_S if lasting else longest
            self._until = now + pause_s * (0.5 + 0.5 * self._chance())
            self._trying, self.cause = False, cause
            self._opened += 1
            return not was_open

    def state(self, now: float) -> tuple[str, float]:
        """ "closed", "open" or "trying", and the seconds until a call is tried."""
        with self._lock:
            if self._until is None:
                return "closed", 0.0
            return ("trying" if self._trying else "open"), max(0.0, self._until - now)
