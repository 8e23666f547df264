"""What became of the pages of a chain, as a line of runs: "pages 0-41 hit, page 42 evicted 12 s ago by pressure"."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mooncake_connector.cli.output import human_seconds
from store_client.fate import Fate, Known, Lost

_GONE = {
    Lost.PRESSURE: "evicted {ago} by pressure, unused for {unused} by then",
    Lost.SHRUNK: "evicted {ago}, when the pool was made smaller",
    Lost.REMOVED: "removed {ago}",
    Lost.CLEARED: "cleared {ago}",
    Lost.CORRUPT: "dropped {ago}: found corrupt",
    Lost.FULL: "not stored {at}: no place could be made",
    Lost.NO_SPACE: "not stored {at}: pool unavailable, the file system is full",
    Lost.BUSY: "not stored {at}: pool unavailable, its lock was held",
    Lost.INDEX: "not stored {at}: the index was full",
    Lost.ERROR: "not stored {at}: pool unavailable, see the engine's log",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Pages `first` to `last` of a chain, of which the same is known. The times are those of the latest of them."""

    first: int
    last: int
    fate: Fate
    reached: bool
    """Whether all pages before these are stored."""

    @property
    def is_hit(self) -> bool:
        return self.reached and self.fate.known is Known.STORED

    def plain(self) -> dict[str, Any]:
        cause = self.fate.cause
        what = "hit" if self.is_hit else "unreached" if self.fate.known is Known.STORED else self.fate.known.value
        told: dict[str, Any] = {"first": self.first, "last": self.last, "what": what}
        if cause is not None:
            told |= {"cause": cause.value, "ago_s": round(self.fate.ago_s, 1)}
            if not cause.refused:
                told["unused_s"] = round(self.fate.unused_s, 1)
        return told


def runs_of(fates: Sequence[Fate]) -> list[Run]:
    """The runs of a chain, in order; `fates` has one for each of its pages."""
    runs: list[Run] = []
    reached = True
    for (known, _), group in groupby(enumerate(fates), lambda page: (page[1].known, page[1].cause)):
        pages = list(group)
        reached = reached and known is Known.STORED
        latest = min((fate for _, fate in pages), key=lambda fate: fate.ago_s)
        runs.append(Run(pages[0][0], pages[-1][0], latest, reached))
    return runs


def hit_pages(runs: Sequence[Run]) -> int:
    """Leading pages that are stored."""
    return runs[0].last + 1 if runs and runs[0].is_hit else 0


def line(runs: Sequence[Run], *, forgets: bool = False) -> str:
    """The runs as text. `forgets`: so much went from the pool that it need not remember all of it."""
    return ", ".join(f"{_pages(run)} {_said(run, forgets)}" for run in runs)


def _pages(run: Run) -> str:
    return f"page {run.first}" if run.first == run.last else f"pages {run.first}-{run.last}"


def _said(run: Run, forgets: bool) -> str:
    fate = run.fate
    if fate.known is Known.STORED:
        return "hit" if run.reached else "stored, but out of reach"
    if fate.cause is None:
        return "never stored, or gone for long" if forgets else "never stored"
    at = time.strftime("%H:%M", time.localtime(time.time() - fate.ago_s))
    ago = f"{human_seconds(fate.ago_s)} ago"
    return _GONE[fate.cause].format(ago=ago, at=f"at {at} ({ago})", unused=human_seconds(fate.unused_s))
