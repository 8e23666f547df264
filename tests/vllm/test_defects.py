"""A defect of ours in one part of the connector costs the others nothing: no request waits for ever for it."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
from cases import PROMPT, Start, steady_runners, warm_pool
from pd import MakePair, figures, prefill_params, run_all

from vllm_plugin.prefix.save_planner import SavePlanner
from vllm_plugin.prefix.saver import Saver


def fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("made to fail")


@steady_runners
@pytest.mark.parametrize("name", ["look_at", "take"])
def test_a_defect_of_saves_costs_no_load(start: Start, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    warm_pool(start)
    monkeypatch.setattr(SavePlanner, name, fail)
    engine = start()
    assert engine.ask(PROMPT) == oracle.generate(PROMPT, 3)
    assert engine.computed("r0") < len(PROMPT)
    engine.check_at_rest()


@steady_runners
@pytest.mark.parametrize("name", ["before_step", "submit"])
def test_a_defect_of_saves_costs_no_hand_over(pair: MakePair, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    both = pair(prefix_reuse=True)
    monkeypatch.setattr(Saver, name, fail)
    request = both.decode.add(PROMPT, 3, params=both.handed_over(PROMPT))
    run_all(*both.both, until=lambda: request in both.decode.reasons)
    both.decode.check_answer(request)
    assert figures(both.decode)["fetched_tokens"] > 0  # of pages that are in the pool already the last tokens alone


@steady_runners
def test_a_defect_of_hand_overs_costs_no_load(pair: MakePair) -> None:
    both = pair(prefix_reuse=True)
    other = [7, *PROMPT]
    both.decode.ask(other)
    assert all(both.decode.pages(other))
    both.prefill.pd._manager = None
    name = both.prefill.add(other, 3)
    leg = both.prefill.add(PROMPT, 1, params=prefill_params())
    run_all(both.prefill, until=lambda: {name, leg} <= both.prefill.reasons.keys())
    assert both.prefill.texts[name] == oracle.generate(other, 3)
    assert both.prefill.computed(name) < len(other)
