"""Instances of one and of two ranks hand over to each other."""

from __future__ import annotations

import pytest

from e2e.client import ServerError
from e2e.pages import wait_for
from e2e.pd.conftest import ORDERS, Ranks
from e2e.questions import Question

both_ways = pytest.mark.parametrize(("name", "prefill"), [("two to one", 0), ("one to two", 1)])


@pytest.mark.parametrize("order", ORDERS)
@both_ways
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


@both_ways
def test_a_transfer_that_fails_fails_its_request_alone(
    ranks: Ranks, asked: dict[str, Question], name: str, prefill: int
) -> None:
    """`transfer_failure: fail`, streamed and not: an error for the client, and the next request is served."""
    here, there = ranks.instances[prefill], ranks.instances[1 - prefill]
    proxy, question = ranks.proxy([here], [there]), asked[name]
    there.expect("due to KV load failure", "failed with an internal error")
    before = there.figure("failures", cause="fetch_failed")
    there.fault("corrupt")
    with pytest.raises(ServerError, match=r"answered 500: .*InternalServerError"):
        proxy.ask_whole(question.prompt, max_tokens=len(question.answer))
    with pytest.raises(ServerError, match=r"ended with an error: .*InternalServerError"):
        proxy.ask(question.prompt, max_tokens=len(question.answer))
    wait_for(lambda: there.figure("failures", cause="fetch_failed") >= before + 2, "both failures in the metrics")
    for instance in (here, there):
        instance.holds_no_block()
    there.heal()
    assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
