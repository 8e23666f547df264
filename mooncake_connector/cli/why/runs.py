"""What became of the pages of a chain, as a line of runs: "pages 0-41 hit, page 42 evicted 12 s ago by pressure"."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mooncake_connector.cli.output import human_seconds
from store_client.fate import Known, Lost
from store_client.runs import Run

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
