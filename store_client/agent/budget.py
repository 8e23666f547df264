"""How fast bytes may be written to a tier."""

from __future__ import annotations

_BURST_S = 0.25
"""What was not used of so much time may be used at once."""


class Bandwidth:
    """Bytes a second, kept on average. Not safe for several threads; `rate` None is no bound."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._free_at = float("-inf")

    def wait_s(self, nbytes: int, now: float) -> float:
        """Seconds to wait before these bytes are written; they count as written then."""
        if self._rate is None:
            return 0.0
        start = max(self._free_at, now - _BURST_S)
        self._free_at = start + nbytes / self._rate
        return max(0.0, start - now)
