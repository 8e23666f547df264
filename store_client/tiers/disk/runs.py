"""Pages that lie side by side in the file are read and written by one call: a small page costs the processor more than
the disk."""

from __future__ import annotations

from collections.abc import Sequence

from store_client.embedded.allocator import Piece
from store_client.tiers.disk.pagefile import GRANULE

Place = tuple[Piece, ...]
"""Where a page lies in the file."""

MOST_NBYTES = 1 << 20
"""Of pages that one call moves: larger ones gain nothing."""


def runs_of(places: Sequence[Place], nbytes: int, at_once: int) -> list[tuple[slice, Place]]:
    """Pages of `nbytes`, in order, as runs that one call can move, and where each run lies.

    Args:
        at_once: calls that may be under way; there are not fewer runs than that for the sake of longer ones.
    """
    most = min(MOST_NBYTES // nbytes, len(places) // at_once) if nbytes % GRANULE == 0 else 1
    runs = list[tuple[slice, Place]]()
    for number, place in enumerate(places):
        if runs:
            run, ((first, granules), *more) = runs[-1]
            if number - run.start < most and not more and len(place) == 1 and place[0][0] == first + granules:
                runs[-1] = slice(run.start, number + 1), ((first, granules + place[0][1]),)
                continue
        runs.append((slice(number, number + 1), place))
    return runs
