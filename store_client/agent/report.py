"""What the agent says of each tier: counters since it was started, and how the tier is now."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

COUNTS = (
    "asked_pages", "hit_pages", "fetched_pages", "fetched_nbytes", "written_pages", "written_nbytes", "present_pages",
    "overtaken_pages", "not_worth_it_pages", "corrupt_pages", "undelivered_pages",
)  # fmt: skip


class Tally:
    """Counters of one tier. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._seconds = {"fetch_s": 0.0, "write_s": 0.0}
        self._errors: dict[str, int] = {}

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count

    def took(self, name: str, seconds: float) -> None:
        """ "fetch_s" or "write_s"."""
        with self._lock:
            self._seconds[name] += seconds

    def failed(self, cause: str) -> None:
        """A call of the tier failed."""
        with self._lock:
            self._errors[cause] = self._errors.get(cause, 0) + 1

    def values(self) -> tuple[dict[str, int], dict[str, float], dict[str, int]]:
        with self._lock:
            return dict(self._counts), dict(self._seconds), dict(self._errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """One tier, for people and metrics. Plain values only."""

    title: str
    kind: str
    reads: str
    """"closed" where it is read from; "open" where it is left alone after failures; "trying"."""
    writes: str
    """The same for what it is given; "none" where it is given nothing."""
    cause: str = ""
    """Why it is left alone."""
    retry_s: float = 0.0
    """Seconds until it is tried again."""
    asked_pages: int = 0
    hit_pages: int = 0
    """Pages asked for that it said it has."""
    fetched_pages: int = 0
    fetched_nbytes: int = 0
    fetch_s: float = 0.0
    """Seconds of all reads, those at the same time counted each."""
    written_pages: int = 0
    written_nbytes: int = 0
    write_s: float = 0.0
    present_pages: int = 0
    """Pages given to it that it had."""
    overtaken_pages: int = 0
    """Pages that were gone from the pool before it was given them."""
    not_worth_it_pages: int = 0
    """Pages it has that the engine computes faster."""
    corrupt_pages: int = 0
    """Pages whose seal did not fit; they are removed from it."""
    undelivered_pages: int = 0
    """Pages it said it has and did not deliver."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Failed calls by cause."""
    queued_pages: int = 0
    """Pages that are to be fetched, and not yet are."""
    latency_s: float = 0.0
    bandwidth: float | None = None
    """Bytes a second as measured lately."""
    capacity_nbytes: int | None = None
    used_nbytes: int | None = None
    pages: int | None = None
    evicted_pages: int = 0
    notes: Mapping[str, str] = field(default_factory=dict)
