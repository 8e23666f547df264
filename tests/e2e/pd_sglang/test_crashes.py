"""One side dies, or stops for a while: what was under way fails within the deadlines, and the other side serves on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.pd_sglang.conftest import Asked, Pair
from e2e.pd_sglang.half_way import half_way
from e2e.pd_sglang.instances import LEASE_S, Both
from e2e.questions import Question


def hands_over(pair: Pair, question: Question) -> None:
    """The right answer, through a router that has found out by now that both are there."""
    router = pair.router("sglang-router")
    assert router.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer


def test_the_prefill_instance_is_killed(pair: Pair, asked: Asked) -> None:
    """In mid-transfer, and away when the next request comes; the decode instance finds it again on its ports."""
    decode = pair.decode.pid
    with half_way(pair, asked["chunks"]) as both:
        pair.prefill.kill()
        assert both.failure()
    pair.prefill.heal()
    with ThreadPoolExecutor(2) as threads:
        assert Both(threads, *pair.instances, asked["short"].prompt, 4).failure()
    pair.decode.holds_nothing()
    pair.prefill.restart()
    hands_over(pair, asked["several"])
    assert pair.decode.pid == decode


def test_the_decode_instance_is_killed(pair: Pair, asked: Asked) -> None:
    """In mid-transfer: the prefill instance has its pages back when nobody can ask for them any more."""
    with half_way(pair, asked["chunks"]) as both:
        pair.decode.kill()
        assert both.failure()
        pair.prefill.heal()
    pair.prefill.holds_nothing()
    pair.decode.restart()
    hands_over(pair, asked["several"])
    pair.prefill.holds_nothing()


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_an_instance_is_stopped_for_a_while(pair: Pair, asked: Asked, stopped: str) -> None:
    """For longer than the lease: what it had under way is given up, what it says later changes nothing."""
    one = getattr(pair, stopped)
    with half_way(pair, asked["chunks"]) as both:
        one.pause()
        try:
            resume_at = time.monotonic() + LEASE_S + 4
            if stopped == "prefill":
                assert both.failure()
            time.sleep(max(0.0, resume_at - time.monotonic()))
        finally:
            one.resume()
            pair.prefill.heal()
        assert both.failure()
    for instance in pair.instances:
        instance.holds_nothing()
    hands_over(pair, asked["several"])
