"""Prefill and decode apart for models with several KV-cache groups: windows, chunks and states.

The pretended model looks at each slot that a group attends to, and at each state that it goes on from.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from mixes import MIXES, chunked, full, state, window
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
from test_walk import check_answers, check_pool
from vllm.v1.kv_cache_interface import KVCacheSpec

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


def window_of_40(block_tokens: int) -> KVCacheSpec:
    return window(40, block_tokens)


def chunk_of_32(block_tokens: int) -> KVCacheSpec:
    return chunked(32, block_tokens)


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


def of_sizes(blocks: tuple[int, int], *specs: Callable[[int], KVCacheSpec]) -> list[dict[str, Any]]:
    """Settings of both sides, whose blocks have so many tokens."""
    return [STEP | {"block_tokens": size, "kv_spec": [spec(size) for spec in specs]} for size in blocks]


@every_order
@pytest.mark.parametrize("blocks", [(48, 16), (64, 32)])
def test_blocks_of_other_sizes(pair: MakePair, blocks: tuple[int, int], order: str) -> None:
    ask_all(pair(*of_sizes(blocks, full, window_of_40, state), granularity="layer"), order)


@every_order
@pytest.mark.parametrize("blocks", [(16, 48), (32, 48)])
def test_without_windows_blocks_of_any_sizes(pair: MakePair, blocks: tuple[int, int], order: str) -> None:
    ask_all(pair(*of_sizes(blocks, full, state), granularity="layer"), order)


@pytest.mark.parametrize("blocks", [(16, 48), (32, 48)])
@pytest.mark.parametrize("part", [window_of_40, chunk_of_32])
def test_windows_that_leave_the_first_of_their_blocks_in_part_empty_are_refused_with_both_sizes(
    pair: MakePair, blocks: tuple[int, int], part: Callable[[int], KVCacheSpec], caplog: pytest.LogCaptureFixture
) -> None:
    both = pair(*of_sizes(blocks, full, part), transfer_lease_s=1)
    both.ask(PROMPT, computed=len(PROMPT) + 2)
    said = [record.getMessage() for record in caplog.records if "window's first block" in record.getMessage()]
    assert said and all(f"blocks of {size} tokens" in line for line in said for size in blocks)


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("part", [window_of_40, chunk_of_32])
@pytest.mark.parametrize("blocks", [(16, 16), (48, 48), (48, 16), (16, 48), (32, 48)])
def test_who_shares_the_prefix_afterwards_reads_no_block_that_came_in_part(
    pair: MakePair, blocks: tuple[int, int], part: Callable[[int], KVCacheSpec], is_pooled: bool, tmp_path: Path
) -> None:
    """Neither in the cache of the decode instance nor, with a pool of its own, there."""
    prefill, decode = of_sizes(blocks, full, part)
    decode |= {"extra": {"pool": str(tmp_path / "other")}}
    both = pair(prefill, decode, granularity="layer", pool=is_pooled, transfer_lease_s=1)
    both.ask(LONG, computed=1 + 2 if blocks[0] % blocks[1] == 0 else len(LONG) + 2)
    for stop in (208, 192, 176, 144):
        both.decode.check([*LONG[:stop], 1, 2, 3])
    if is_pooled:
        assert check_pool(both.decode) > 0
        assert both.decode.scheduler.reset_prefix_cache()
        both.decode.check([*LONG[:192], 4, 5, 6])


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_other_numbers_of_ranks(pair: MakePair, ranks: tuple[int, int]) -> None:
    sides = [{"tp_size": count, "kv_spec": [full(heads=2 // count), window(40, heads=2 // count)]} for count in ranks]
    ask_all(pair(*(STEP | side for side in sides), granularity="layer"), "concurrent")


@pytest.mark.parametrize("mix", ["windows", "state", "all"])
@pytest.mark.parametrize("layers_a_group", [1, 2])
@pytest.mark.parametrize("stages", [(2, 2), (1, 2), (2, 1), (3, 2)])
def test_other_numbers_of_stages(pair: MakePair, mix: str, layers_a_group: int, stages: tuple[int, int]) -> None:
    """In models of one layer a group stages have none of some groups."""
    side = STEP | {"kv_spec": MIXES[mix], "layers_a_group": layers_a_group}
    counts = [min(count, layers_a_group * len(MIXES[mix])) for count in stages]
    both = pair(*(side | {"pp_size": count} for count in counts), granularity="layer")
    ask_all(both, "concurrent", lengths=(2, 64, 213))
    assert figures(both.decode)["fetched_tokens"] == 1 + 63 + len(LONG) - 1


@every_order
def test_states_beside_proposals_are_handed_over(pair: MakePair, order: str) -> None:
    side = STEP | {"kv_spec": [full(), state(drafts=3), window(40)], "drafts": 3}
    both, lengths = pair(side, side, granularity="layer"), (2, 35, 64, 213)
    for length in lengths:  # what was proposed in vain is computed as well
        both.ask(LONG[-length:], NUM_OUTPUT, order=order)
    assert not both.failures()
    assert figures(both.decode)["fetched_tokens"] > 300


def test_who_proposes_another_number_of_tokens_has_states_of_another_form(
    pair: MakePair, caplog: pytest.LogCaptureFixture
) -> None:
    """Convolutions keep as many tokens more as may turn out wrong."""
    longer = dataclasses.replace(state(drafts=3), shapes=((6, 4), (2, 2, 3)))
    sides = [STEP | {"kv_spec": [full(), spec], "drafts": count} for spec, count in ((state(), 0), (longer, 3))]
    both = pair(*sides, transfer_lease_s=1)
    both.ask(PROMPT)
    assert "only one side has section 1 state 3x4 2x2x3, 1 state 6x4 2x2x3" in caplog.text
    assert not figures(both.decode).get("fetched_tokens")


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


def test_a_prefill_leg_leaves_the_list_of_the_prompt_as_it_is(pair: MakePair) -> None:
    """In an engine inside the caller's process it is the caller's, for other samples of the prompt too."""
    both, prompt = pair(**alike("window")), list(PROMPT)
    both.ask(prompt, computed=1 + 2)
    assert prompt == PROMPT


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
