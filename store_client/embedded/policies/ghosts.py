"""The pages that went lately: fingerprints in a table that the newest overwrites."""

import numpy as np
import numpy.typing as npt

from store_client.embedded.names import U8, U64
from store_client.embedded.policies.hints import Hints

_NUMBER = 1
"""Word of the header: evictions so far."""
_HIGH, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


class Ghosts:
    """For the holder of the write lock."""

    def __init__(self, hints: Hints) -> None:
        self._hints = hints
        self._mask = np.uint64(len(hints.ghosts) - 1)

    def add(self, prints: U64, turns: U8) -> None:
        """These pages go, in turn so and so of their conversations."""
        first = self._hints.next_number(_NUMBER, len(prints))
        numbers = np.arange(first, first + len(prints), dtype=np.uint64) & _LOW
        at = (prints & self._mask).astype(np.int64)
        self._hints.ghosts[at] = prints >> _HIGH << _HIGH | numbers
        self._hints.ghost_turn[at] = turns

    def seen(self, prints: U64, within: int) -> tuple[npt.NDArray[np.bool_], U8]:
        """Whether each page is among the last `within` that went, and its turn then."""
        at = (prints & self._mask).astype(np.int64)
        found = self._hints.ghosts[at]
        age = (self._hints.header[_NUMBER] - found) & _LOW
        same: npt.NDArray[np.bool_] = (found >> _HIGH == prints >> _HIGH) & (age <= within) & (found != 0)
        return same, self._hints.ghost_turn[at]
