"""How well a figure is known that was made from samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RESAMPLED = 2000


@dataclass(frozen=True)
class Spread:
    """A figure, and where 95 of 100 such figures lie that are drawn from the same samples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"

    @classmethod
    def of(cls, ours: Sequence[float], plain: Sequence[float], figure: Callable[[Sequence[float]], float]) -> Spread:
        """Of ours, less that of `plain` where that has samples; rounds are drawn together where both have as many."""
        draw = random.Random(0)

        def difference(mine: Sequence[float], other: Sequence[float]) -> float:
            return figure(mine) - (figure(other) if other else 0.0)

        found = sorted(
            difference(draw.choices(ours, k=len(ours)), draw.choices(plain, k=len(plain)) if plain else ())
            for _ in range(_RESAMPLED)
        )
        return cls(difference(ours, plain), found[len(found) // 40], found[-1 - len(found) // 40])
