"""Where pages go in the arena: contiguous where possible, gathered from small runs where not."""

import time
from typing import TYPE_CHECKING

import numpy as np

from mooncake_connector.log import get_logger, log_once
from mooncake_connector.sizes import human_nbytes
from store_client.embedded.arena import GRANULE, GROWTH_NBYTES, Arena
from store_client.embedded.counters import Counters
from store_client.embedded.extents import as_runs, without
from store_client.embedded.rows import INLINE_EXTENTS

if TYPE_CHECKING:
    from store_client.embedded.ledger import Draft

logger = get_logger(__name__)

Piece = tuple[int, int]
"""(first granule, granules)."""

LIST_ENTRY_NBYTES = 8
MAX_PIECES = GRANULE // LIST_ENTRY_NBYTES
_GROWTH = GROWTH_NBYTES // GRANULE
_RETRY_GROWTH_S = 1.0


def granules_of(nbytes: int) -> int:
    return -(-nbytes // GRANULE)


class Allocator:
    """Takes space within a ledger transaction, and secures more of the arena file when there is none."""

    def __init__(self, arena: Arena, counters: Counters) -> None:
        self._arena = arena
        self._counters = counters
        self._no_growth_before = 0.0

    def make_room(self, draft: "Draft", count: int, nbytes: int) -> str:
        """Grow the arena until the pages fit or it is at its limit; returns the cause should they not fit."""
        wanted = count * granules_of(nbytes)
        while draft.free.total < wanted and draft.high_water < draft.capacity:
            if not self._grow(draft, wanted - draft.free.total):
                return "no_space"
        return "full"

    def _grow(self, draft: "Draft", wanted: int) -> bool:
        if time.monotonic() < self._no_growth_before:
            return False
        left = draft.capacity - draft.high_water
        for step in (max(_GROWTH, wanted), wanted, _GROWTH // 16):
            size = min(step, left)
            try:
                self._arena.secure(draft.high_water, draft.high_water + size)
            except OSError as error:
                reason = error
                continue
            # A writer may still fill space that a shrink cut off and that comes back here.
            held = np.concatenate([as_runs([]), *(reservation.space_runs for reservation in draft.reservations())])
            draft.free.add(without(draft.high_water, draft.high_water + size, held))
            draft.high_water += size
            return True
        self._no_growth_before = time.monotonic() + _RETRY_GROWTH_S
        log_once(
            "store.no_space",
            "the pool's file system has no room for the pool to grow (%s): using %s of %s, evicting beyond that; "
            "free space there, or set a smaller capacity",
            reason, human_nbytes(draft.high_water * GRANULE), human_nbytes(draft.capacity * GRANULE), logger=logger,
        )  # fmt: skip
        return False

    @staticmethod
    def shortage(draft: "Draft", count: int, nbytes: int) -> tuple[int, int]:
        """Granules and slots that are missing for `count` pages; zero or less where there are enough.

        A granule a page is added once free space is in small runs, for the list of a page's extents.
        """
        need = count * granules_of(nbytes)
        free = draft.free
        if len(free) > INLINE_EXTENTS:
            need += count
        return need - free.total, count - draft.slots.total

    @staticmethod
    def take(draft: "Draft", count: int, nbytes: int) -> list[list[Piece]]:
        """The extents of up to `count` pages; as many as there is space and slots for."""
        size = granules_of(nbytes)
        count = min(count, draft.slots.total)
        pages: list[list[Piece]] = [[(start, size)] for start in draft.free.take_whole(count, size)]
        while len(pages) < count:
            pieces = draft.free.take_pieces(size, INLINE_EXTENTS)
            if pieces is None:
                # One granule more, in front, for the list of the others.
                pieces = draft.free.take_pieces(size + 1, MAX_PIECES)
                if pieces is None:
                    break
                first, length = pieces[0]
                pieces[:1] = [(first, 1), (first + 1, length - 1)] if length > 1 else [(first, 1)]
            pages.append(pieces)
        return pages
