"""A pool's figures, for its own processes, and for who looks in from outside without a lock or a write."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from mooncake_connector.errors import PoolError
from store_client.base import StoreStats
from store_client.embedded.arena import GRANULE
from store_client.embedded.folder import Unusable, index_nbytes, read_description
from store_client.embedded.locks import read_file
from store_client.embedded.names import U64
from store_client.embedded.owners import waiting_counts
from store_client.embedded.table import (
    AGES,
    CAUSES,
    COUNTERS,
    HEADER_NBYTES,
    counters_in,
    handovers_in,
    totals_in,
)

_LOOKS, _PAUSE_S = 20, 0.002
"""Where a process was killed while it handed counts over, and nobody has since, all of them are in vain."""


def figures(
    location: str, max_pages: int, read_header: Callable[[], U64], read_waiting: Callable[[], dict[str, int]]
) -> StoreStats:
    """What a table's header says, and what processes have counted and not handed over yet, at one moment: both are read
    again where counts were handed over in between."""
    for _ in range(_LOOKS):
        header, waiting = read_header(), read_waiting()
        if handovers_in(header) % 2 == 0 and handovers_in(read_header()) == handovers_in(header):
            break
        time.sleep(_PAUSE_S)
    counts = counters_in(header)
    for name, count in waiting.items():
        counts[name] += count
    pages, used, capacity = totals_in(header)
    return StoreStats(
        location, capacity * GRANULE, used * GRANULE, pages, index_nbytes(max_pages), max_pages,
        **{name: counts[name] for name in COUNTERS},
        failures={cause: counts[cause] for cause in CAUSES if counts[cause]},
        evicted_ages=tuple(counts[name] for name in AGES[:-1]), evicted_unused_s=counts[AGES[-1]],
    )  # fmt: skip


class Glances:
    """Looks at the pool in a folder, whichever is there. No counter falls while it is the same pool."""

    def __init__(self, pool: Path) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._id = ""
        self._latest: StoreStats | None = None

    def look(self) -> tuple[str, StoreStats]:
        """The figures, and a name that another pool in the same folder does not have.

        Raises PoolError where there is no pool, or one that this version does not read.
        """
        pool_id, stats = _look(self.pool)
        with self._lock:
            if self._latest is not None and pool_id == self._id:
                stats = _not_below(stats, self._latest)
            self._id, self._latest = pool_id, stats
        return pool_id, stats


def _look(pool: Path) -> tuple[str, StoreStats]:
    try:
        description = read_description(pool)
        if description is None:
            raise PoolError(f"there is no pool in {pool}")
        data = description.data(pool)
        stats = figures(
            str(pool), description.max_pages, lambda: _header(data / "table"), lambda: waiting_counts(data / "owners")
        )
    except (Unusable, OSError) as error:
        raise PoolError(f"pool {pool} gives no figures: {error}") from None
    return description.id, stats


def _header(table: Path) -> U64:
    return np.frombuffer(read_file(table, 0, HEADER_NBYTES).ljust(HEADER_NBYTES, b"\0"), dtype="<u8")


def _not_below(stats: StoreStats, former: StoreStats) -> StoreStats:
    causes = {*stats.failures, *former.failures}
    return replace(
        stats,
        **{name: max(getattr(stats, name), getattr(former, name)) for name in (*COUNTERS, "evicted_unused_s")},
        failures={cause: max(stats.failures.get(cause, 0), former.failures.get(cause, 0)) for cause in causes},
        evicted_ages=tuple(map(max, stats.evicted_ages, former.evicted_ages)),
    )
