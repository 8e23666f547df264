"""Prefix reuse through vLLM's scheduler: what is computed once is loaded afterwards, and the text stays the same."""

from __future__ import annotations

from collections.abc import Callable

import oracle
import pytest
from harness import Engine

Start = Callable[..., Engine]

PROMPT = list(range(1, 101))

RUNNERS = [
    pytest.param({}, id="v1"),
    pytest.param({"v2_runner": True}, id="v2"),
    pytest.param({"async_scheduling": True}, id="v1-async"),
    pytest.param({"v2_runner": True, "async_scheduling": True}, id="v2-async"),
    pytest.param({"v2_runner": True, "async_scheduling": True, "lazy": True}, id="v2-async-lazy"),
]


@pytest.mark.parametrize("runner", RUNNERS)
def test_another_engine_loads_what_the_first_one_computed(start: Start, runner: dict[str, bool]) -> None:
    first = start(**runner)
    assert first.ask(PROMPT, 20) == oracle.generate(PROMPT, 20)
    first.check_at_rest()
    second = start(**runner)
    assert second.ask(PROMPT, 20, name="again") == oracle.generate(PROMPT, 20)
    second.check_at_rest()
    assert second.computed("again") == len(PROMPT) - 96 + 19
