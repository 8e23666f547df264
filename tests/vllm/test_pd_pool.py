"""The pool and another instance together: pages that are in the pool come from there, and only the rest travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import every_runner, steady_runners
from pd import PROMPT, MakePair, Pair, decode_params, every_order, figures, jobs, node_of, prefill_params, run_all

NUM_TOKENS = len(PROMPT)
SHARED = PROMPT[:48]
"""Three pages."""


def warmed(pair: MakePair, warm: list[int], sides: dict[str, Any] | None = None, **settings: Any) -> Pair:
    """Both read the same pool, which has the pages of a prompt, and have nothing of it in their own cache."""
    both = pair(sides, sides, pool=True, **settings)
    both.prefill.ask(warm)
    for engine in both.both:
        assert engine.scheduler.reset_prefix_cache()
    return both


@every_runner
@every_order
def test_what_is_in_the_pool_is_loaded_and_only_the_rest_travels(pair: MakePair, order: str) -> None:
    both = warmed(pair, SHARED)
    both.ask(PROMPT, order=order, computed=1 + 2)
    (job,) = jobs(both.decode)
    if order == "sequential":  # prefill has stored the rest meanwhile, or not yet
        assert job.first_token >= 48
    else:
        assert job.first_token == 48
    assert figures(both.prefill)["load_bytes"] == 3 * 16 * 2 * 2 * 8
    both.check_at_rest()
    assert not both.failures()


@every_runner
def test_what_travels_is_stored_at_both_ends(pair: MakePair, tmp_path: Path) -> None:
    """The decode instance has a pool of its own."""
    both = pair(decode={"extra": {"pool": str(tmp_path / "other")}}, pool=True)
    both.ask(PROMPT, computed=1 + 2)
    for engine in both.both:
        assert all(engine.pages(PROMPT))
    assert figures(both.decode)["fetched_tokens"] == NUM_TOKENS
    both.check_at_rest()


@every_runner
@pytest.mark.parametrize(("num_tokens", "block_tokens"), [(80, 16), (48, 32)], ids=["", "ends-within-a-block"])
def test_a_prompt_that_is_in_the_pool_as_a_whole_does_not_travel(
    pair: MakePair, num_tokens: int, block_tokens: int
) -> None:
    """Whole pages all of it: the prefill instance is told that it is through, and counts no failure."""
    whole = PROMPT[:num_tokens]
    both = warmed(pair, whole, {"block_tokens": block_tokens})
    both.ask(whole, computed=1 + 2)
    assert [(job.first_token, job.stop_token) for job in jobs(both.decode)] == [(num_tokens, num_tokens)]
    assert "fetch_bytes" not in figures(both.decode) or figures(both.decode)["fetch_bytes"] == 0
    assert not both.failures()
    both.check_at_rest()


@every_runner
@pytest.mark.parametrize("hold", [False, True], ids=["", "transfer-first"])
def test_a_page_that_the_pool_lost_is_computed_with_all_after_it(pair: MakePair, faults, hold: bool) -> None:
    both = warmed(pair, SHARED)
    answer = both.handed_over(PROMPT)
    faults.lose_reads = lambda keys: [index == 1 for index, _ in enumerate(keys)]
    if hold:
        faults.hold_reads()
    name = both.decode.add(PROMPT, 3, params=answer)
    if hold:
        run_all(*both.both, until=lambda: not both.prefill.scheduler.has_requests())
        faults.lose_reads = lambda keys: [index == 1 for index, _ in enumerate(keys)]
        faults.release()
    both.finish(name, computed=NUM_TOKENS - 16 + 2)


@every_runner
def test_a_transfer_that_fails_leaves_what_came_from_the_pool(pair: MakePair) -> None:
    both = warmed(pair, SHARED, transfer_deadline_s=0.3)
    name = both.decode.add(PROMPT, 3, params={
        "do_remote_prefill": True, "transfer_id": "never", "remote_host": "127.0.0.1",
        "remote_port": both.prefill.pd._directory.port,
    })  # fmt: skip
    both.finish(name, computed=NUM_TOKENS - 48 + 2)


@steady_runners
@pytest.mark.parametrize(("page_tokens", "block_tokens"), [(32, 16), (16, 32), (16, 48), (64, 48)])
def test_no_block_is_filled_from_two_sides(pair: MakePair, page_tokens: int, block_tokens: int) -> None:
    sizes = {"page_tokens": page_tokens, "block_tokens": block_tokens}
    both = pair({"page_tokens": page_tokens}, sizes, pool=True)
    longer = [*PROMPT, *PROMPT]
    both.prefill.ask(longer[:70])
    both.ask(longer, order="concurrent", computed=1 + 2)
    (job,) = jobs(both.decode)
    assert job.first_token % block_tokens == 0
    both.check_at_rest()
    assert not both.failures()


def test_what_the_pool_has_beyond_a_shorter_local_hit_is_not_loaded_beyond_a_longer_one(pair: MakePair) -> None:
    """Requests wait for blocks between two lookups."""
    both = warmed(pair, PROMPT[:80])
    decode = both.decode
    name = decode.add(PROMPT, 3, params=decode_params(both.prefill, "x"))
    request = decode.requests[name]
    assert decode.connector.get_num_new_matched_tokens(request, 0) == (NUM_TOKENS, True)
    assert decode.prefix.offered(request) == 80
    assert decode.connector.get_num_new_matched_tokens(request, 80) == (NUM_TOKENS - 80, True)
    assert decode.prefix.offered(request) == 0
    decode.abort(name)
    both.finish()


@every_runner
def test_a_prefill_leg_that_is_aborted_while_it_loads_is_reported_once(pair: MakePair, faults) -> None:
    """vLLM forgets it when the load has ended, and would end itself over a second report."""
    both = warmed(pair, SHARED)
    faults.hold_reads()
    name = both.prefill.add(PROMPT, 1, params=prefill_params())
    run_all(*both.both, until=faults.reading.is_set)
    both.prefill.abort(name)
    both.prefill.steps(3)
    faults.release()
    both.finish()
    both.ask(PROMPT, computed=1 + 2)


@every_runner
def test_a_prefill_leg_that_was_preempted_and_is_aborted_while_it_loads_again(pair: MakePair, faults) -> None:
    """It did compute, less than a page, but holds nothing of that any more."""
    both = warmed(pair, SHARED, {"max_num_batched_tokens": 4})
    name = both.prefill.add(PROMPT, 1, params=prefill_params())
    run_all(both.prefill, until=lambda: both.prefill.computed(name))
    faults.hold_reads()
    both.prefill.preempt()
    run_all(both.prefill, until=faults.reading.is_set)
    both.prefill.abort(name)
    run_all(both.prefill, until=lambda: not node_of(both.prefill)._serving.producer.held)
    both.prefill.steps(3)
    assert name in both.prefill.scheduler.requests, "its blocks are free while they are loaded into"
    faults.release()
    both.finish()
    assert both.prefill.requests[name].num_preemptions == 1
