"""What became of the pages of a chain, as runs of pages of which the same is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from store_client.fate import Fate, Known


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
