"""Weights or adapters changed in memory under transfers: nothing computed with the old ones is taken for what the new
ones give."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cases import every_runner
from core import Core
from pd import PROMPT, MakePair, decode_params, granted, last, node_of, prefill_params, run_all, transfers_of
from simulated.waiting import wait_for
from test_adapters import adapter, lora, write
from test_pd_prefill import CHUNKED

import transfer.serving
from vllm_plugin.weights import calls

NUM_TOKENS = len(PROMPT)


@every_runner
@pytest.mark.parametrize("announced", [False, True])
def test_a_decode_leg_that_waits_is_computed_with_the_new_weights(pair: MakePair, announced: bool) -> None:
    both = pair(decode={"num_blocks": 8, "prefix_caching": False}, pool=True)
    params = both.handed_over(PROMPT)
    busy = both.decode.add([3] * 90, 20)
    both.decode.step()
    name = both.decode.add(PROMPT, 3, params=params)
    if announced:
        both.decode.step()
    both.decode.change_weights()
    both.finish(name, computed=NUM_TOKENS + 2)
    assert both.decode.reasons[busy] == "length"
    both.decode.pages(PROMPT, weights=1)


@every_runner
@pytest.mark.parametrize("start_over", [False, True])
@pytest.mark.parametrize("computed", [0, 32])
def test_a_prefill_leg_under_way_hands_nothing_over(pair: MakePair, computed: int, start_over: bool) -> None:
    both = pair(CHUNKED, granularity="full")
    name = both.add_computed(computed)
    both.prefill.change_weights(start_over=start_over)
    both.finish(name, computed=NUM_TOKENS + 2)
    assert both.prefill.answers[last(both.prefill)] is None


@every_runner
@pytest.mark.parametrize("computed", [32, NUM_TOKENS])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_prefill_leg_whose_adapter_is_another_one_hands_nothing_over(
    pair: MakePair, tmp_path: Path, loaded: bool, computed: int
) -> None:
    """Where it is all computed the decode leg comes after the other adapter, or it might have all KV before."""
    both = pair(CHUNKED, granularity="full")
    theirs, ours = (adapter(tmp_path / name, b"weights") for name in ("theirs", "ours"))
    leg = both.prefill.add(PROMPT, 2, params=prefill_params("x"), lora_request=lora(theirs))
    decode = partial(both.decode.add, PROMPT, 3, params=decode_params(both.prefill, "x"), lora_request=lora(ours))
    name = decode() if computed < NUM_TOKENS else ""
    run_all(*(both.both if name else [both.prefill]), until=lambda: both.prefill.computed(leg) >= computed)
    write(theirs, b"others!")  # a worker may read the files again at any time
    if loaded:
        Core(both.prefill).add_lora(lora(theirs, load_inplace=True))
    name = name or decode()
    both.run()
    both.check_at_rest()
    assert both.prefill.answers[leg] is None
    assert both.decode.computed(name) == NUM_TOKENS + 2


@every_runner
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_decode_leg_whose_adapter_is_replaced_while_it_waits_is_computed_with_the_new_one(
    pair: MakePair, tmp_path: Path, loaded: bool, blocked: bool
) -> None:
    both = pair(decode={"num_blocks": 8, "prefix_caching": False})
    theirs, ours = (adapter(tmp_path / name, b"weights") for name in ("theirs", "ours"))
    params = both.handed_over(PROMPT, lora_request=lora(theirs))
    if blocked:
        both.decode.add([3] * 90, 20)
        both.decode.step()
    name = both.decode.add(PROMPT, 3, params=params, lora_request=lora(ours))
    write(ours, b"others!")
    if loaded:
        Core(both.decode).add_lora(lora(ours, load_inplace=True))
    both.run()
    both.check_at_rest()
    assert both.decode.computed(name) == NUM_TOKENS + 2


@every_runner
def test_what_vllms_own_cache_has_of_a_former_adapter_is_not_handed_over(pair: MakePair, tmp_path: Path) -> None:
    both = pair()
    theirs, ours = adapter(tmp_path / "theirs", b"weights"), adapter(tmp_path / "ours", b"others!")
    both.prefill.ask(PROMPT, lora_request=lora(theirs))
    write(theirs, b"others!")
    again = lora(theirs, load_inplace=True)
    Core(both.prefill).add_lora(again)
    leg = both.prefill.add(PROMPT, 1, params=prefill_params("x"), lora_request=again)
    name = both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "x"), lora_request=lora(ours))
    both.run()
    both.check_at_rest()
    assert both.prefill.computed(leg) < NUM_TOKENS, "there was no local hit"
    assert both.prefill.answers[leg] is None
    assert both.decode.computed(name) == NUM_TOKENS + 2


@every_runner
def test_what_vllms_own_cache_has_of_former_weights_is_not_handed_over(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM goes on with it: nobody has emptied its cache."""
    monkeypatch.setattr(calls, "_has_own_process", lambda core: True)
    both = pair()
    both.prefill.ask(PROMPT)
    for engine in both.both:
        Core(engine).load(1)
        engine.ask(PROMPT[::-1])  # with this the new weights are known
    monkeypatch.setattr(both.prefill.workers[0].runner, "_attend", lambda *args: None)
    name = both.add(PROMPT, order="concurrent")
    both.finish(name, computed=NUM_TOKENS + 2)
    leg = last(both.prefill)
    assert both.prefill.computed(leg) < NUM_TOKENS, "there was no local hit"
    assert both.prefill.answers[leg] is None


@every_runner
def test_blocks_held_for_a_consumer_come_free(pair: MakePair) -> None:
    both = pair()
    answer = both.handed_over(PROMPT)
    both.prefill.change_weights()
    run_all(both.prefill)
    assert not both.failures()
    name = both.decode.add(PROMPT, 3, params=answer)
    both.finish(name, computed=NUM_TOKENS + 2)


@every_runner
def test_what_is_sent_while_its_blocks_are_computed_again_does_not_count(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is on its way; it arrives in the middle of the next forward pass."""
    go_on = threading.Event()
    send = transfer.serving._send

    def slow(*args: Any) -> Any:
        assert go_on.wait(60)
        return send(*args)

    monkeypatch.setattr(transfer.serving, "_send", slow)
    both = pair({"num_blocks": 7, "prefix_caching": False}, granularity="layer")
    name = both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "x"))
    run_all(both.decode, until=lambda: granted(both.prefill))
    leg = both.prefill.add(PROMPT, 5, params=prefill_params("x"))
    run_all(both.prefill, until=lambda: both.prefill.computed(leg) > NUM_TOKENS)
    wait_for(lambda: any(session.writing for one in transfers_of(both.prefill) for session in one.sessions.values()))

    def layer_computed(number: int) -> None:
        go_on.set()
        wait_for(lambda: not node_of(both.decode)._fetching.consumer.held)

    both.prefill.change_weights(start_over=True)
    both.prefill.workers[0].layer_computed = layer_computed
    both.finish(name, computed=NUM_TOKENS + 2)


@every_runner
def test_a_word_that_passes_the_end_of_its_transfer_is_dropped(pair: MakePair) -> None:
    """The consumer has all of it, and the scheduler does not know yet."""
    both = pair()
    name = both.add(PROMPT)
    run_all(both.decode, until=lambda: name in both.decode.reasons)
    wait_for(lambda: all(one.ending for one in transfers_of(both.prefill)))
    both.prefill.begin_step()
    assert both.prefill.pd._outgoing
    both.prefill.connector.reset_cache()
    both.finish(name, computed=1 + 2)
