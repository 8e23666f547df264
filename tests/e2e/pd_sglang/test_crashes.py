"""One side dies, or stops for a while: what was under way fails within the deadlines, and the other side serves on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.pd_sglang.conftest import Asked, Pair
from e2e.pd_sglang.half_way import half_way, hands_over, is_refused
from e2e.pd_sglang.instances import LEASE_S, Both, Instance
from e2e.process import running


def test_the_prefill_instance_is_killed(pair: Pair, asked: Asked) -> None:
    """In mid-transfer, and away when the next request comes; the decode instance finds it again on its ports."""
    decode = pair.decode.pid
    with half_way(pair, asked["chunks"]) as both:
        pair.prefill.kill()
        assert both.failure()
    pair.prefill.heal()
    pair.prefill.start()
    with ThreadPoolExecutor(2) as threads:  # SGLang looks for a prefill instance for a quarter of a minute
        assert Both(threads, *pair.instances, asked["short"].prompt, 4).failure()
    pair.decode.holds_nothing()
    pair.prefill.wait_until_ready()
    hands_over(pair, asked["several"])
    assert pair.decode.pid == decode


def test_the_decode_instance_is_killed(pair: Pair, asked: Asked, misfit: Callable[[str], Instance]) -> None:
    """In mid-transfer: prefill has its pages back when nobody can ask for them. With its successor a stranger comes."""
    with half_way(pair, asked["chunks"]) as both:
        pair.decode.kill()
        assert both.failure()
        pair.prefill.heal()
    pair.prefill.holds_nothing()
    pair.decode.start()
    with running(misfit("secret")) as stranger:
        pair.decode.wait_until_ready()
        is_refused(pair, stranger, "secret", asked["several"])


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
