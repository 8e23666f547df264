"""Prefill and decode apart for models with several KV-cache groups: windows, chunks and states.

The pretended model looks at each slot that a group attends to, and at each state that it goes on from.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
from mixes import MIXES, full, state, window
from pd import (
    PROMPT,
    MakePair,
    Pair,
    decode_params,
    every_granularity,
    every_order,
    figures,
    last,
    prefill_params,
    run_all,
)
from test_pd_walk import Walk
from test_walk import check_answers

import transfer.fetching
import transfer.serving
from vllm_plugin.geometry import Group

LONG = [token % oracle.VOCAB for token in range(11, 11 * 213, 11)]
STEP = {"max_num_batched_tokens": 48, "num_blocks": 80}
NUM_OUTPUT = 24
"""More than a block: windows move on, and states into another block."""

every_mix = pytest.mark.parametrize("mix", MIXES)


@pytest.fixture(autouse=True)
def _each_layer_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.serving, "_MIN_BATCH_NBYTES", 1)


def alike(mix: str, **settings: Any) -> dict[str, dict[str, Any]]:
    """Settings of both sides."""
    return {side: STEP | {"kv_spec": MIXES[mix]} | settings for side in ("prefill", "decode")}


def ask_all(both: Pair, order: str, lengths: tuple[int, ...] = (2, 35, 55, 64, 213)) -> None:
    """Prompts shorter than a window, longer, and such that with their last token vLLM takes a block of it back."""
    for length in lengths:
        both.ask(LONG[-length:], NUM_OUTPUT, order=order, computed=NUM_OUTPUT)
    assert not both.failures()


@every_mix
@every_order
def test_decode_computes_the_last_token_of_a_prompt_and_no_other(pair: MakePair, mix: str, order: str) -> None:
    ask_all(pair(**alike(mix), granularity="layer"), order)


@every_granularity
def test_in_every_granularity(pair: MakePair, granularity: str) -> None:
    ask_all(pair(**alike("all", layers_a_group=2), granularity=granularity), "concurrent")


def test_without_a_prefix_cache(pair: MakePair) -> None:
    ask_all(pair(**alike("windows", prefix_caching=False), granularity="layer"), "concurrent")


@every_order
@pytest.mark.parametrize("blocks", [(16, 48), (48, 16), (32, 48)])
def test_blocks_of_other_sizes(pair: MakePair, blocks: tuple[int, int], order: str) -> None:
    specs = [{"kv_spec": [full(size), window(40, size), state(size)]} for size in blocks]
    prefill, decode = (STEP | {"block_tokens": size} | spec for size, spec in zip(blocks, specs, strict=True))
    ask_all(pair(prefill, decode, granularity="layer"), order)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_other_numbers_of_ranks(pair: MakePair, ranks: tuple[int, int]) -> None:
    sides = [{"tp_size": count, "kv_spec": [full(heads=2 // count), window(40, heads=2 // count)]} for count in ranks]
    ask_all(pair(*(STEP | side for side in sides), granularity="layer"), "concurrent")


def test_states_of_two_ranks_go_to_two(pair: MakePair) -> None:
    side = STEP | {"tp_size": 2, "kv_spec": [full(heads=1), state(heads=1)]}
    ask_all(pair(side, side, granularity="layer"), "concurrent")


def test_a_state_that_cannot_be_split_again_is_refused_with_both_sizes(
    pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    sides = [{"tp_size": count, "kv_spec": [full(heads=2 // count), state(heads=2 // count)]} for count in (1, 2)]
    both = pair(*(STEP | side for side in sides), transfer_lease_s=1)
    both.ask(PROMPT, computed=len(PROMPT) + 2)
    said = [record.getMessage() for record in caplog.records if "section '1 state 3x4 2x2x3'" in record.getMessage()]
    assert said and all("KV heads 0..0 of 1" in line and "KV heads 0..0 of 2" in line for line in said)


@every_mix
@every_order
def test_after_a_local_hit_the_rest_travels(pair: MakePair, mix: str, order: str) -> None:
    both = pair(**alike(mix), granularity="chunk")
    both.ask(LONG[:81], 1)
    both.ask(LONG[:150], NUM_OUTPUT, order=order, computed=NUM_OUTPUT)
    assert figures(both.decode)["fetched_tokens"] == 80 + 149 - 80
    both.check_at_rest()


@every_mix
def test_a_preempted_prefill_is_sent_as_it_is_computed_again(pair: MakePair, mix: str) -> None:
    both = pair(**alike(mix), granularity="full")
    name = both.add_granted(LONG, NUM_OUTPUT)
    leg = last(both.prefill)
    run_all(*both.both, until=lambda: both.prefill.computed(leg) >= 96)
    both.prefill.preempt()
    both.finish(name, computed=NUM_OUTPUT)


@every_mix
@pytest.mark.parametrize("times", [1, 2])
def test_a_byte_of_any_group_that_changed_on_its_way(
    pair: MakePair, mix: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: it is sent again. Twice: all of it is computed, since vLLM takes no single blocks of several groups."""
    check: Callable[..., Any] = transfer.fetching._check
    for section in range(len(MIXES[mix])):
        both, spoilt = pair(**alike(mix), granularity="full"), []

        def spoil(
            origin: Any, landed: Any, tables: Any, *rest: Any, both: Any = both, spoilt: Any = spoilt, at: int = section
        ) -> Any:
            if landed.section == at and len(spoilt) < times:
                spoilt.append(landed.attempt)
                both.decode.workers[0].memory[0, tables[at].block_ids[-1], 0] ^= np.uint64(1)
            return check(origin, landed, tables, *rest)

        monkeypatch.setattr(transfer.fetching, "_check", spoil)
        name = both.ask(PROMPT)
        assert spoilt == list(range(times))
        assert both.decode.computed(name) == (1 if times == 1 else len(PROMPT)) + 2
        assert figures(both.decode).get("failures", {}) == ({} if times == 1 else {"fetch_failed": 1})


@pytest.mark.parametrize("mix", ["window", "windows", "chunked", "all"])
def test_what_the_prefill_instance_has_given_back_is_not_sent(
    pair: MakePair, mix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode instance that wants more than its windows: the blocks may be another request's by then."""
    both = pair(**alike(mix), granularity="full")
    both.ask(LONG, NUM_OUTPUT, computed=NUM_OUTPUT)
    monkeypatch.setattr(Group, "first_kept", lambda group, num_tokens: 0)
    name = both.decode.add([1, *LONG], 3, params=both.handed_over([1, *LONG]))
    both.finish(name, computed=1 + len(LONG) + 2)
    assert figures(both.decode)["failures"] == {"fetch_failed": 1}


@pytest.mark.parametrize("mix", ["window", "state"])
def test_a_prompt_that_has_no_last_token_to_leave_is_prefilled_where_it_is(
    pair: MakePair, mix: str, caplog: pytest.LogCaptureFixture
) -> None:
    both = pair(**alike(mix))
    for prompt, settings in (([7], {}), (PROMPT, {"prompt_logprobs": 1})):
        leg = both.prefill.add(prompt, 1, params=prefill_params("x"), **settings)
        both.decode.add(prompt, 3, params=decode_params(both.prefill, "x"), **settings)
        both.finish(last(both.decode), computed=len(prompt) + 2)
        assert both.prefill.answers[leg] is None
    assert sum("hybrid model is prefilled here" in record.getMessage() for record in caplog.records) == 1


def test_a_prefill_leg_stops_before_the_last_token_whatever_it_was_asked_for(pair: MakePair) -> None:
    both = pair(**alike("all"))
    answer = both.handed_over(PROMPT, max_tokens=9)
    assert answer["remote_num_tokens"] == both.prefill.computed(last(both.prefill)) == len(PROMPT) - 1
    assert both.prefill.reasons[last(both.prefill)] == "length"
    both.finish(both.decode.add(PROMPT, NUM_OUTPUT, params=answer), computed=NUM_OUTPUT)


@every_order
def test_beside_the_pool_a_transfer_brings_all(pair: MakePair, order: str) -> None:
    both = pair(**alike("windows"), pool=True)
    both.prefill.check(LONG[:96])
    name = both.ask(LONG, NUM_OUTPUT, order=order, computed=NUM_OUTPUT)
    assert figures(both.decode)["fetched_tokens"] == len(LONG) - 1
    both.decode.check(LONG, NUM_OUTPUT)
    assert name in both.decode.reasons


@every_mix
def test_random_walk(pair: MakePair, mix: str) -> None:
    rng = random.Random(mix)
    sides = {"prefill": {"num_blocks": 44}, "decode": {"num_blocks": 40, "prefix_caching": mix != "window"}}
    settings = {side: {"kv_spec": MIXES[mix], "max_num_batched_tokens": 64} | own for side, own in sides.items()}
    both = pair(**settings, granularity="layer", transfer_lease_s=1, transfer_deadline_s=1.0)
    walk = Walk(both, rng)
    while walk.count < 25 or walk.waiting or any(one.scheduler.has_unfinished_requests() for one in both.both):
        if walk.count < 25 and rng.random() < 0.2:
            walk.ask()
        walk.step()
        walk.hand_over()
    run_all(*both.both)
    check_answers(*both.both)
    both.check_at_rest()
