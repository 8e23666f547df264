"""How much may still be written today: flash wears out with every byte, and a day's share is what people reckon in."""

from __future__ import annotations

import threading
import time

from store_client.tiers.disk.index import Meta

_DAY_S = 86400


class Budget:
    """Counts what is written, a day (UTC) at a time, over restarts.

    Args:
        daily_nbytes: None for no bound.
        meta: what was counted before.
        unknown_nbytes: what may have been written since and was not counted.
    """

    def __init__(self, daily_nbytes: int | None, meta: Meta, unknown_nbytes: int) -> None:
        self._daily_nbytes = daily_nbytes
        self._day, self._written_nbytes = meta.day, meta.written_nbytes + unknown_nbytes
        self._lock = threading.Lock()

    def take(self, pages: int, nbytes: int) -> int:
        """So many of the pages may be written, and count as written."""
        with self._lock:
            self._turn_over()
            if self._daily_nbytes is not None:
                pages = min(pages, max(0, self._daily_nbytes - self._written_nbytes) // nbytes)
            self._written_nbytes += pages * nbytes
        return pages

    def give_back(self, nbytes: int) -> None:
        """What was taken and not written."""
        with self._lock:
            self._written_nbytes = max(0, self._written_nbytes - nbytes)

    @property
    def left_nbytes(self) -> int | None:
        with self._lock:
            self._turn_over()
            return None if self._daily_nbytes is None else max(0, self._daily_nbytes - self._written_nbytes)

    def meta(self, file: bytes, closed: bool) -> Meta:
        with self._lock:
            return Meta(file, self._day, self._written_nbytes, closed)

    def _turn_over(self) -> None:
        """A clock that is set back begins no new day; one that was far ahead holds up no later one."""
        if (today := int(time.time() // _DAY_S)) > self._day:
            self._day, self._written_nbytes = today, 0
        elif today < self._day - 1:
            self._day = today
