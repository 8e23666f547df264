"""Which rail a slice goes over: the sender's view of those that lead to one peer, without verbs, threads or clocks.

A slice goes to the rail that would be done with it first, by the speed that was measured of each. One that broke is
out: it is tried again in the background, later each time, and is taken back once a number was read over it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from mooncake_connector.log import get_logger, log_once

logger = get_logger(__name__)

QUEUED_NBYTES = 64 << 20
"""Ordered over one rail and not there yet, at most: the rest goes where there is room first."""
TYPICAL_NBYTES = 4 << 20
"""A slice, where rails are compared."""
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 30.0
"""A rail that is out is tried at once, and then after so long, twice as long each time."""
STEADY_S = 10.0
"""One that breaks sooner than this after it came back is not tried at once."""
HOPELESS_TRIES = 2
"""Where every rail is out and has failed so often, the peer is lost."""
_KEPT = 0.9
"""Of what was measured before, with each `TYPICAL_NBYTES` more."""


class RailCounts:
    """Of a process, by the name of the rail, since they were last taken. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}

    def add(self, figure: str, rail: str, amount: int = 1) -> None:
        with self._lock:
            self._counts.setdefault(figure, Counter())[rail] += amount

    def take(self) -> dict[str, dict[str, int]]:
        """By figure and rail: `rail_bytes`, `rail_direct_bytes`, `rail_failures` and `rail_recoveries`,
        and by what is said of it `rail_opened`."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return {figure: dict(by_rail) for figure, by_rail in counts.items()}


class Path:
    """A rail to one peer; `number` is the peer's for it. It begins as out, to be tried."""

    def __init__(self, number: int, name: str, nominal_bytes_per_s: float) -> None:
        self.number, self.name = number, name
        self.epoch = -1
        self.is_in = False
        self.in_flight_nbytes = 0
        self.try_at: float | None = 0.0
        """When it is tried again; None while it is in, or being tried."""
        self.failed_tries = 0
        """One after the other."""
        self.ever_in = False
        self._nominal = nominal_bytes_per_s
        self._moved_nbytes = self._took_s = 0.0
        self._busy_since = 0.0
        self._strikes = 0
        self._back_at = float("-inf")

    @property
    def bytes_per_s(self) -> float:
        """As measured, and of a rail that has moved nothing yet what its link promises."""
        return self._moved_nbytes / self._took_s if self._took_s > 0 else self._nominal

    @property
    def would_take_s(self) -> float:
        """Until one more slice is there."""
        return (self.in_flight_nbytes + TYPICAL_NBYTES) / self.bytes_per_s

    def order(self, nbytes: int, now: float) -> None:
        """A slice goes over it."""
        if not self.in_flight_nbytes:
            self._busy_since = now
        self.in_flight_nbytes += nbytes

    def over(self, nbytes: int, now: float, *, moved: bool) -> None:
        """A slice is over; its bytes are there where `moved`."""
        self.in_flight_nbytes -= nbytes
        if moved:
            kept = _KEPT ** (nbytes / TYPICAL_NBYTES)
            self._moved_nbytes = self._moved_nbytes * kept + nbytes
            self._took_s = self._took_s * kept + max(now - self._busy_since, 1e-9)
            self._busy_since = now

    def begin_try(self) -> None:
        self.epoch += 1
        self.try_at = None

    def back(self, now: float) -> None:
        self.is_in = self.ever_in = True
        self.failed_tries, self._back_at = 0, now
        self._moved_nbytes = self._took_s = 0.0  # what it did while it was failing says nothing of it now

    def still_out(self, now: float) -> None:
        self.failed_tries += 1
        self._strike(now)

    def broke(self, now: float) -> None:
        self.is_in = False
        if now - self._back_at >= STEADY_S:
            self._strikes, self.try_at = 0, now
        else:
            self._strike(now)

    def _strike(self, now: float) -> None:
        self.try_at = now + min(FIRST_RETRY_S * 2**self._strikes, LAST_RETRY_S)
        self._strikes = min(self._strikes + 1, 30)


class Paths:
    """All rails to one peer. For one thread at a time; `now` is a time in seconds that only grows."""

    def __init__(self, paths: Sequence[Path], counts: RailCounts) -> None:
        self.all = paths
        self._counts = counts

    def best(self) -> Path | None:
        """Over which the next slice goes; None where it has to wait, for room or for a rail that is in."""
        best = min((path for path in self.all if path.is_in), key=lambda path: path.would_take_s, default=None)
        return best if best is not None and best.in_flight_nbytes < QUEUED_NBYTES else None

    def due(self, now: float) -> list[Path]:
        """Those to try now, first who has waited longest: where each takes long, none keeps others from their turn."""
        waiting = [(path.try_at, path.number, path) for path in self.all if path.try_at is not None]
        return [path for at, _, path in sorted(waiting) if at <= now]

    @property
    def next_try_at(self) -> float | None:
        return min((path.try_at for path in self.all if path.try_at is not None), default=None)

    @property
    def is_busy(self) -> bool:
        return any(path.in_flight_nbytes for path in self.all)

    @property
    def is_hopeless(self) -> bool:
        return all(not path.is_in and path.failed_tries >= HOPELESS_TRIES for path in self.all)

    def over(self, path: Path, nbytes: int, now: float, *, moved: bool) -> None:
        """A slice that was ordered is over."""
        path.over(nbytes, now, moved=moved)
        if moved:
            self._counts.add("rail_bytes", path.name, nbytes)

    def broke(self, path: Path, epoch: int, now: float, why: str) -> None:
        """It is out, unless that is known, or was in an epoch that is over."""
        if not path.is_in or epoch != path.epoch:
            return
        path.broke(now)
        self._out(path, why)

    def tried(self, path: Path, now: float, why_not: str) -> None:
        """A number was read over it, unless it says why not."""
        if why_not:
            path.still_out(now)
            if path.failed_tries == 1 and not path.ever_in:
                self._out(path, why_not)
            return
        if path.ever_in:
            self._counts.add("rail_recoveries", path.name)
            log_once(f"transfer.rdma.back:{path.name}", "rdma: rail %s to a peer is back", path.name, logger=logger)
        path.back(now)

    def _out(self, path: Path, why: str) -> None:
        self._counts.add("rail_failures", path.name)
        left = sum(other.is_in for other in self.all)
        log_once(
            f"transfer.rdma.out:{path.name}:{why}",
            "rdma: rail %s to a peer is out: %s; going on over %d others (logged once per cause, counted in the "
            "metrics)", path.name, why, left, logger=logger,
        )  # fmt: skip
