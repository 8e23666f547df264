"""Clients that leave at any moment, transfers that SGLang takes for failed: nothing is kept, and nothing is wrong."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from long_form import LONG

from e2e.client import ServerError
from e2e.pages import wait_for
from e2e.pd_sglang.conftest import CHUNK_TOKENS, Asked, Pair
from e2e.pd_sglang.half_way import half_way, hands_over
from e2e.pd_sglang.instances import KINDS, Both
from e2e.questions import Question, draw_tokens

REQUESTS = 200 if LONG else 24
AT_ONCE = 8


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS if LONG else KINDS[:1])
def test_clients_leave_under_load(pair: Pair, asked: Asked, kind: str) -> None:
    router, source = pair.router(kind), random.Random(4)
    plans = [
        (source.choice(asked.crowd), source.uniform(0, 2) if source.random() < 0.5 else None) for _ in range(REQUESTS)
    ]

    def attempt(plan: tuple[Question, float | None]) -> bool:
        question, leaves_after_s = plan
        if leaves_after_s is not None:
            router.leave(question.prompt, after_s=leaves_after_s, max_tokens=256)
            return True
        return router.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(attempt, plans))
    assert outcomes == [True] * REQUESTS
    for instance in pair.instances:
        instance.holds_nothing()


@pytest.mark.long
@pytest.mark.skipif(not LONG, reason="it has a long form alone (`make test-long`); tests/sglang has it in one process")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_is_aborted_while_it_is_prefilled(pair: Pair, asked: Asked, side: str) -> None:
    """On either side alone: the other one's ends as well."""
    begun = pair.prefill.num_chunks()
    with ThreadPoolExecutor(2) as threads:
        both = Both(threads, *pair.instances, draw_tokens(random.Random(6), 12 * CHUNK_TOKENS), 4)
        wait_for(lambda: pair.prefill.num_chunks() > begun or both.decode.done(), "a chunk of prefill")
        getattr(pair, side).abort(both.rid)
        assert both.failure()
    for instance in pair.instances:
        instance.holds_nothing()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_is_aborted_while_it_is_handed_over(pair: Pair, asked: Asked, side: str) -> None:
    question = asked["several"]
    with half_way(pair, question) as both:
        getattr(pair, side).abort(both.rid)
        if side == "prefill":
            pair.prefill.heal()
        assert both.failure()
        pair.prefill.heal()
    for instance in pair.instances:
        instance.holds_nothing()
    hands_over(pair, question)


@pytest.mark.parametrize(("side", "probability"), [("prefill", 0.2), ("decode", 0.005)])
def test_transfers_that_fail_at_random(pair: Pair, asked: Asked, side: str, probability: float) -> None:
    """By SGLang's own injection, each time that its scheduler looks: also while the transfer itself goes on."""
    router = pair.router("sglang-router")
    getattr(pair, side).fault("fail", str(probability))

    def attempt(question: Question) -> bool:
        try:
            answer = router.ask_whole(question.prompt, max_tokens=len(question.answer))
        except ServerError:
            return False
        assert answer == question.answer
        return True

    with ThreadPoolExecutor(AT_ONCE) as threads:
        answered = list(threads.map(attempt, asked.crowd * 3))
    print(f"{sum(answered)} of {len(answered)} were answered")
    assert not all(answered)
    for instance in pair.instances:
        instance.heal()
        instance.holds_nothing()
    assert all(map(attempt, asked.crowd))
