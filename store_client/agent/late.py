"""Pages that a tier was given without an answer: it may store them long after the call was given up.

That is right for a page that the pool still has, and for one that was evicted meanwhile. One that was cleared must not
come back, so it is removed from the tier again once nothing can be under way any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from store_client.tiers.base import SpaceName

SETTLED_S = 120.0
"""Until then a write that was given up has happened, or never will."""
_MOST = 1024
"""The oldest are dropped."""
TRIES = 5
"""To remove them, each `SETTLED_S` after the one before."""


class Late(NamedTuple):
    name: SpaceName
    keys: Sequence[bytes]
    clears: int
    """How often the pool had been cleared when the tier was given them."""
    due_s: float = 0.0
    tries: int = 0


class LateWrites:
    """Of one tier. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Late] = deque(maxlen=_MOST)

    def note(self, late: Late, now_s: float) -> None:
        """Think of it in `SETTLED_S`."""
        if late.keys and late.tries < TRIES:
            with self._lock:
                self._waiting.append(late._replace(due_s=now_s + SETTLED_S, tries=late.tries + 1))

    def due(self, now_s: float) -> Late | None:
        """One to think of now."""
        if not self._waiting or now_s < self._waiting[0].due_s:
            return None
        with self._lock:
            return self._waiting.popleft() if self._waiting and now_s >= self._waiting[0].due_s else None
