"""Instances of one and of two ranks hand over to each other."""

from __future__ import annotations

import pytest

from e2e.pages import wait_for
from e2e.pd.conftest import ORDERS, Ranks
from e2e.questions import Question


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "prefill"), [("two to one", 0), ("one to two", 1)])
def test_ranks_of_another_number_go_on(
    ranks: Ranks, asked: dict[str, Question], name: str, prefill: int, order: str
) -> None:
    here, there = ranks.instances[prefill], ranks.instances[1 - prefill]
    proxy, question = ranks.proxy([here], [there], order=order), asked[name]
    before = there.figure("fetched_tokens")
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
    wait_for(lambda: there.figure("fetched_tokens") > before, "the transfer in the metrics")
    here.holds_no_block()

    ranks.forget()
    here.fault("falsify")
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) != question.answer
    assert here.saw("falsify")
