"""Whether the tests take their long forms: thousands of kills instead of dozens, minutes of load instead of seconds."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

__all__ = ["LONG", "examples", "sampled"]

LONG = os.environ.get("MOONCAKE_TEST_LONG") == "1"
"""Set by `make test-long`."""


def examples(count: int) -> int:
    """How many a property test takes of `count` that show well at once what it is for: two fifths, since each run draws
    others, and four times as many in the long form."""
    return 4 * count if LONG else 2 * count // 5


def sampled(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every second combination: each value is among them, and of three lists each two values together. All of them in
    the long form; a test over them is marked `long`."""
    combinations = itertools.product(*map(enumerate, values))
    return [
        tuple(value for _, value in one) for one in combinations if LONG or sum(place for place, _ in one) % 2 == 0
    ]
