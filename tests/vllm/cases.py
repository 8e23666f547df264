"""Values that several tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Engine

Start = Callable[..., Engine]

PROMPT = list(range(1, 101))
"""Six full pages of 16 tokens and 4 tokens more."""

RUNNERS = [
    pytest.param({}, id="v1"),
    pytest.param({"v2_runner": True}, id="v2"),
    pytest.param({"async_scheduling": True}, id="v1-async"),
    pytest.param({"v2_runner": True, "async_scheduling": True}, id="v2-async"),
    pytest.param({"v2_runner": True, "async_scheduling": True, "lazy": True}, id="v2-async-lazy"),
]
every_runner = pytest.mark.parametrize("runner", RUNNERS)
"""What `start` and `pair` take for granted in the tests that are marked so."""
steady_runners = pytest.mark.parametrize("runner", [RUNNERS[0], RUNNERS[-1]])


FIRST_RUNNER = {"v2_runner": False, "async_scheduling": False, "lazy": False}


def warm_pool(start: Start, *prompts: list[int], max_tokens: int = 3, **settings: object) -> None:
    """Fill the pool with the pages of some prompts, by an engine that is gone afterwards."""
    engine = start(**FIRST_RUNNER | settings)
    engine.ask_all(prompts or [PROMPT], max_tokens)
    engine.check_at_rest()
    engine.shut_down()
