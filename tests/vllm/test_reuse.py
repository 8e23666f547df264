"""Prefix reuse through vLLM's scheduler: what was computed once is loaded afterwards, and the text stays the same.

Every comparison of texts has teeth: the pretended model also compares each KV slot that it attends to with what the
request's own prefix must have there (oracle.py).
"""

from __future__ import annotations

import oracle
import pytest
from cases import PROMPT, Start, every_runner, warm_pool, warmed
from runner import WrongKV

from mooncake_connector.kv.keys import page_keys


@every_runner
def test_another_engine_loads_what_the_first_one_computed(start: Start) -> None:
    first = start()
    first.check(PROMPT, 20)
    second = start()
    second.check(PROMPT, 20, name="again")
    assert second.computed("again") == len(PROMPT) - 96 + 19


def test_a_page_with_other_kv_under_the_right_key_is_noticed_by_these_tests(start: Start) -> None:
    """Negative control of the whole harness: the pool is filled with pages of other weights."""
    engine = start()
    engine.workers[0].runner.weights = 1
    engine.ask(PROMPT)
    engine.shut_down()
    with pytest.raises(WrongKV):
        start().ask(PROMPT)


@every_runner
def test_a_prompt_of_exactly_full_pages_is_loaded_whole_and_its_last_token_computed_again(start: Start) -> None:
    """Trap 1. Cure: loads are asynchronous; for those the scheduler itself rewinds one token."""
    prompt = PROMPT[:96]
    warm_pool(start, prompt)
    engine = start()
    engine.check(prompt, 4, computed=1 + 3)


def test_a_prompt_shorter_than_a_page_is_neither_looked_up_nor_saved(start: Start, faults) -> None:
    engine = start()
    assert engine.ask(PROMPT[:12], 3) == oracle.generate(PROMPT[:12], 3)
    assert faults.calls["lookup"] == 0
    assert engine.num_pages() == 0


@pytest.mark.parametrize("shared", [15, 16, 40, 95])
def test_only_the_common_full_pages_of_two_prompts_are_reused(start: Start, shared: int) -> None:
    warm_pool(start)
    prompt = [*PROMPT[:shared], *range(300, 400)]
    engine = start()
    engine.check(prompt, 5, computed=len(prompt) - shared // 16 * 16 + 4)


def test_generated_tokens_are_reused_in_the_next_turn(start: Start) -> None:
    answer = oracle.generate(PROMPT, 60)
    warm_pool(start, max_tokens=60)
    turn = [*PROMPT, *answer, 7, 8, 9]
    engine = start()
    engine.check(turn, 3, computed=len(turn) - (len(PROMPT) + 59) // 16 * 16 + 2)


@pytest.mark.parametrize("block_tokens", [16, 32, 48, 128])
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
def test_blocks_and_pages_of_any_two_sizes_go_together(start: Start, block_tokens: int, page_tokens: int) -> None:
    """The second engine has computed part of the prompt itself, up to a border of its blocks and not of pages.

    A gain of less than a page is left alone (the default of `min_hit_tokens`).
    """
    size = {"page_tokens": page_tokens, "block_tokens": block_tokens, "num_blocks": 96}
    prompt = list(range(1, 331))
    warm_pool(start, prompt, block_tokens=16, page_tokens=page_tokens, num_blocks=96)
    engine = start(**size)
    local = [*prompt[:200], *range(400, 420)]
    assert engine.ask(local) == oracle.generate(local, 3)
    assert engine.ask(prompt, 20, name="again") == oracle.generate(prompt, 20)
    in_blocks = 200 // block_tokens * block_tokens
    in_pages = 330 // page_tokens * page_tokens
    reused = in_pages if in_pages - in_blocks >= page_tokens else in_blocks
    assert engine.computed("again") == 330 - reused + 19
    engine.check_at_rest()
    assert all(engine.pages([*prompt, *oracle.generate(prompt, 19)]))


@pytest.mark.parametrize(
    "memory",
    [
        {"layout": "LBHNC"},
        {"layout": "LBNHC"},
        {"layout": "BLHNC"},
        {"layout": "BHLNC"},
        {"layout": "LBNHC", "block_tokens": 64, "kernel_tokens": 16},
        {"layout": "LBHNC", "block_tokens": 64, "tp_size": 2, "kernel_tokens": 16},
    ],
    ids=str,
)
def test_engines_of_every_memory_layout_share_pages(start: Start, memory: dict[str, object]) -> None:
    warm_pool(start, page_tokens=16, tp_size=memory.get("tp_size", 1))
    engine = start(page_tokens=16, **memory)
    engine.check(PROMPT, 5, computed=4 + 4)
    other = list(range(200, 290))
    engine.ask(other)
    assert all(engine.pages(other))


def test_a_local_hit_that_covers_the_prompt_costs_no_lookup(start: Start, faults) -> None:
    engine = start()
    engine.ask(PROMPT)
    asked = faults.calls["lookup"]
    assert engine.ask(PROMPT, name="again") == oracle.generate(PROMPT, 3)
    assert engine.computed("again") == 4 + 2, "the local prefix cache did not hit"
    assert faults.calls["lookup"] == asked


def test_each_page_is_stored_once(start: Start, faults) -> None:
    engine = start()
    prompts = [[*PROMPT[:64], last] for last in range(8)]
    engine.check_all(prompts, 5)
    engine.ask(PROMPT, name="again")
    second = start(prefix_caching=False)
    second.check_all([PROMPT, PROMPT], 3)
    assert faults.written and set(faults.written.values()) == {1}


def test_a_waiting_request_is_looked_up_once_and_not_every_step(start: Start, faults, monkeypatch) -> None:
    monkeypatch.setattr("vllm_plugin.prefix.lookups._LOOKUP_REUSE_S", 600.0)
    engine = start(num_blocks=16)
    engine.add(list(range(150)), 40)
    engine.step()
    asked = faults.calls["lookup"]
    engine.add(list(range(200, 350)), 2)  # does not fit beside the first one
    engine.steps(10)
    assert faults.calls["lookup"] == asked + 1
    engine.finish()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_the_pool_is_read_and_written_in_every_role(start: Start, role: str) -> None:
    engine = warmed(start, kv_role=role)
    other = list(range(200, 260))
    engine.ask(PROMPT, name="again")
    engine.ask(other)
    assert engine.computed("again") == 4 + 2
    assert all(engine.pages(other))
    engine.check_at_rest()


def test_a_small_hit_is_computed_instead_where_min_hit_tokens_says_so(start: Start) -> None:
    engine = warmed(start, extra={"min_hit_tokens": 64}, prefix_caching=False)
    engine.ask([*PROMPT[:50], 7], name="small")
    engine.ask([*PROMPT[:70], 7], name="large")
    assert engine.computed("small") == 51 + 2
    assert engine.computed("large") == 71 - 64 + 2


def test_prompt_logprobs_need_all_tokens_computed_so_nothing_is_loaded(start: Start, faults) -> None:
    """vLLM ignores the hit of such a request after it asked for it."""
    engine = warmed(start)
    engine.check(PROMPT, prompt_logprobs=1, computed=len(PROMPT) + 2)
    assert faults.calls["read"] == 0


@every_runner
@pytest.mark.parametrize("stop_at", [1, 12, 13, 29])
def test_a_request_that_ends_with_a_stop_token_saves_the_pages_it_computed(
    start: Start, runner: dict[str, bool], stop_at: int
) -> None:
    """The last sampled token has no KV, except that asynchronous scheduling may have computed it already.

    With 100 + 12 tokens the seventh page is full only then.
    """
    answer = oracle.generate(PROMPT, 40)
    assert answer[stop_at - 1] not in answer[: stop_at - 1]
    engine = start()
    assert engine.ask(PROMPT, 40, stop=[answer[stop_at - 1]]) == answer[:stop_at]
    engine.check_at_rest()
    computed = len(PROMPT) + stop_at - 1
    pages = (computed + runner.get("async_scheduling", False)) // 16
    assert engine.pages([*PROMPT, *answer]) == [page < pages for page in range(140 // 16)]
    assert engine.num_pages() == pages


def test_engines_of_other_weights_share_nothing(start: Start) -> None:
    warm_pool(start, model_id="one")
    engine = start(model_id="another")
    engine.ask(PROMPT, name="again")
    assert engine.computed("again") == len(PROMPT) + 2


def test_the_pages_of_the_pool_are_those_of_the_prompt(start: Start) -> None:
    """Keys are the chain over tokens, from the first one on, and nothing else is in the pool."""
    engine = start()
    engine.ask(PROMPT)
    assert engine.pages(PROMPT) == [True] * 6
    assert engine.num_pages() == len(page_keys(PROMPT, 16)) == 6
