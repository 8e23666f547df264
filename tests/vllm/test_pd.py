"""Prefill in one instance, decode in another: what arrives is what was computed, however it is asked for and cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import Start, every_runner, steady_runners
from pd import (
    ORDERS,
    PD_ONLY,
    PROMPT,
    MakePair,
    Pair,
    decode_params,
    every_granularity,
    every_order,
    figures,
    granted,
    jobs,
    node_of,
    prefill_params,
    run_all,
)
from simulated.waiting import wait_for
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import transfer.serving


@pytest.fixture(autouse=True)
def _layers_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are small here; otherwise they would wait for each other to be worth a batch."""
    monkeypatch.setattr(transfer.serving, "_MIN_BATCH_NBYTES", 1)


@every_runner
@every_order
@every_granularity
def test_decode_goes_on_with_what_prefill_computed(pair: MakePair, order: str, granularity: str) -> None:
    """In chunks, so that all granularities differ. Only the last token is computed again, to sample from it."""
    both = pair({"max_num_batched_tokens": 32}, granularity=granularity)
    both.ask(PROMPT, 5, order=order, computed=1 + 4)
    assert not both.failures()


# When what travels


def chunks_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, int]]:
    """Batches as they are written: first layer, layers, first token, stop token."""
    sent = []
    send = transfer.serving._send

    def noted(visitor: Any, peer: Any, order: Any, *rest: Any) -> Any:
        batch = order.batch
        sent.append((batch.first_layer, batch.num_layers, batch.first_token, batch.stop_token))
        return send(visitor, peer, order, *rest)

    monkeypatch.setattr(transfer.serving, "_send", noted)
    return sent


@pytest.mark.parametrize(
    ("granularity", "batches"),
    [
        ("full", [(0, 2, 0, 83)]),
        ("chunk", [(0, 2, 0, 32), (0, 2, 32, 64), (0, 2, 64, 83)]),
        ("layer", [(layer, 1, *part) for part in [(0, 32), (32, 64), (64, 83)] for layer in (0, 1)]),
    ],
)
@every_runner
def test_a_transfer_is_cut_as_its_granularity_says(
    pair: MakePair, granularity: str, batches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = chunks_of(monkeypatch)
    both = pair({"max_num_batched_tokens": 32}, granularity=granularity)
    name = both.add_granted(PROMPT)
    both.run()
    both.decode.check_answer(name)
    assert sorted(sent) == sorted(batches)


def test_the_granularity_follows_the_length_of_the_prompt(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = chunks_of(monkeypatch)
    both = pair({"max_num_batched_tokens": 32}, granularity_chunk_tokens=40, granularity_layer_tokens=60)
    for length, batches in [(39, 1), (40, 2), (60, 2), (61, 4)]:
        sent.clear()
        prompt = [length, *PROMPT][:length]
        transfer_id = f"of {length}"
        both.decode.add(prompt, 1, params=decode_params(both.prefill, transfer_id))
        run_all(both.decode, until=partial(granted, both.prefill, transfer_id))
        both.prefill.add(prompt, 1, params=prefill_params(transfer_id))
        both.run()
        assert len(sent) == batches, length


@pytest.mark.parametrize("granularity", ["chunk", "layer"])
@every_runner
def test_kv_arrives_while_the_rest_is_still_to_be_computed(pair: MakePair, granularity: str) -> None:
    """Prefill does not go on before the layer, or the chunk, is there."""
    both = pair({"max_num_batched_tokens": 32}, granularity=granularity)
    name = both.add_granted(PROMPT)
    (job,) = jobs(both.decode)
    expected = oracle.slots(oracle.chain(PROMPT), range(2), range(2))
    seen: list[tuple[int, int]] = []

    def check(layer: int) -> None:
        progress = [step.pd.computed for step in both.prefill.metadata if step.pd.computed]
        chunk = len(seen) // 2
        stop = next(iter(progress[chunk].values()))[0].stop_token if granularity == "layer" else chunk * 32
        seen.append((layer, stop))
        tokens = np.arange(stop)
        blocks = np.array(job.block_ids)[tokens // 16]
        memory = both.decode.workers[0].memory[layer]
        wait_for(lambda: np.array_equal(memory[blocks, :, tokens % 16], expected[:stop, layer]))

    both.prefill.workers[0].layer_computed = lambda layer: check(layer) if len(seen) < 6 else None
    both.run()
    stops = [32, 64, 83] if granularity == "layer" else [0, 32, 64]
    assert seen == [(layer, stop) for stop in stops for layer in (0, 1)]
    both.decode.check_answer(name)


# Lengths, ranks, layouts


@steady_runners
@every_order
@every_granularity
def test_prompts_of_any_length(pair: MakePair, order: str, granularity: str) -> None:
    both = pair(granularity=granularity)
    for length in [1, 2, 15, 16, 17, 32, 33, 83]:
        prompt = [length, *PROMPT][:length]
        both.ask(prompt, 4, order=order, computed=1 + 3)
    both.check_at_rest()
    assert not both.failures()


SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]
"""TP and PP size. There are two layers and two KV heads: at TP=4 two ranks have the same head."""


@pytest.mark.parametrize("decode", SPLITS, ids="to-tp{0[0]}pp{0[1]}".format)
@pytest.mark.parametrize("prefill", SPLITS, ids="tp{0[0]}pp{0[1]}".format)
def test_instances_that_are_split_otherwise(pair: MakePair, prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """The order of memory differs as well, and with both, blocks of three times the size."""
    sides = [{"tp_size": tp, "pp_size": pp, "layout": "LBNHC"} for tp, pp in (prefill, decode)]
    sides[0] |= {"block_tokens": 48, "layout": "LBHNC", "max_num_batched_tokens": 40}
    both = pair(*sides, granularity="layer")
    for order in ORDERS:
        prompt = [len(order), *PROMPT]
        both.ask(prompt, 4, order=order, computed=1 + 3)
    both.check_at_rest()
    assert not both.failures()


MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=oracle.SLOT_ELEMENTS, dtype=torch.float16)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2)])
def test_latent_kv_that_every_rank_has(
    pair: MakePair, base_config: Any, prefill: int, decode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        monkeypatch.setattr(base_config.model_config.hf_text_config, name, 2, raising=False)
    both = pair({"kv_spec": MLA, "tp_size": prefill}, {"kv_spec": MLA, "tp_size": decode}, granularity="layer")
    both.ask(PROMPT, 4, computed=1 + 3)
    assert not both.failures()


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BHLNC", "BLHNC"])
@pytest.mark.parametrize(("prefill", "decode"), [(16, 64), (64, 16), (48, 32), (16, 16)])
def test_blocks_of_other_sizes_and_orders(pair: MakePair, prefill: int, decode: int, layout: str) -> None:
    """A request that goes on from a local hit at each side is cut at other tokens there."""
    both = pair({"block_tokens": prefill, "layout": "LBNHC"}, {"block_tokens": decode, "layout": layout})
    both.ask(PROMPT, 4)
    longer = [*PROMPT, *PROMPT[:50]]
    for order in ORDERS:
        both.ask([*longer, len(order)], 4, order=order, computed=1 + 3)
    assert {job.first_token for job in jobs(both.decode)} == {0, 83 // decode * decode, 133 // decode * decode}
    both.check_at_rest()
    assert not both.failures()


# Only what is needed travels


@every_runner
@every_order
def test_after_a_local_hit_the_rest_travels_and_shared_blocks_are_not_written(
    pair: MakePair, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair()
    both.ask(PROMPT[:70])
    memory = node_of(both.decode)._fetching._memory
    ranges = []
    grant = memory.grant
    monkeypatch.setattr(memory, "grant", lambda *given: ranges.append(given) or grant(*given))
    before = figures(both.decode)["fetch_bytes"]
    both.ask(PROMPT, order=order)
    assert [job.first_token for job in jobs(both.decode)] == [0, 64]
    assert figures(both.decode)["fetched_tokens"] == 70 + 19
    assert figures(both.decode)["fetch_bytes"] - before == 32 * 2 * 2 * 8
    ((addresses, nbytes),) = ranges
    (shared,) = {tuple(job.block_ids[:4]) for job in jobs(both.decode)}
    whole = both.decode.workers[0].memory
    for block in shared:
        for layer in range(2):
            place = whole[layer, block].ctypes.data
            assert not ((addresses <= place) & (place < addresses + nbytes)).any(), "a shared block was granted"
    both.check_at_rest()


# Many


@every_runner
@pytest.mark.parametrize("twice", ["prefill", "decode"])
def test_two_instances_of_a_kind_and_many_requests_in_any_order(start: Start, twice: str) -> None:
    engines = one, *others = [start(num_blocks=160, extra=PD_ONLY) for _ in range(3)]
    pairs = [Pair(other, one) if twice == "prefill" else Pair(one, other) for other in others]
    asked = []
    for number in range(24):
        both, order = pairs[number % 2], ORDERS[number // 2 % 2]
        asked.append((both, both.add([number, *PROMPT][: 20 + 3 * number], 6, order=order, name=f"r{number}")))
    run_all(*engines)
    for both, name in asked:
        both.decode.check_answer(name, 1 + 5)
        assert not both.failures()
    for engine in engines:
        engine.check_at_rest()


@every_runner
@every_order
def test_one_transfer_asked_for_by_several_requests(pair: MakePair, order: str) -> None:
    """As with `n=2`, or a proxy that tries again: one of them gets it, the other one computes."""
    both = pair()
    names = [both.add(PROMPT, 5, order=order)]
    params = both.decode.requests[names[0]].kv_transfer_params
    names.append(both.decode.add(PROMPT, 5, params=dict(params)))
    both.run()
    for name in names:
        both.decode.check_answer(name)
    both.check_at_rest()


@every_runner
def test_one_transfer_given_by_several_requests(pair: MakePair) -> None:
    both = pair({"max_num_batched_tokens": 32}, granularity="layer")
    name = both.add_granted(PROMPT)
    both.prefill.add(PROMPT, 1, params=prefill_params("x"))
    both.finish(name)
