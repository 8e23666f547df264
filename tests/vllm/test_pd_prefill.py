"""The prefill instance: what it hands over, how long it holds blocks, and what happens when its request ends early."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import oracle
import pytest
from cases import every_runner
from pd import (
    PD_ONLY,
    PROMPT,
    MakePair,
    Pair,
    every_order,
    last,
    node_of,
    prefill_params,
    run_all,
    transfers_of,
)
from settings import Setup, multi_connector, transfer_config
from simulated.waiting import wait_for

import transfer.serving

NUM_TOKENS = len(PROMPT)
CHUNKED = {"max_num_batched_tokens": 32}


@pytest.fixture(autouse=True)
def _layers_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.serving, "_MIN_BATCH_NBYTES", 1)


@every_runner
def test_where_batches_are_computed_in_parts_no_layer_is_given_away_before_the_step_is_over(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM names a layer after each part of a batch, and does not say which requests are in it."""
    both = pair(CHUNKED | {"dual_batch_overlap": True}, granularity="layer")
    name = both.add_granted(PROMPT)
    node, told = node_of(both.prefill), []
    computed = node.computed
    monkeypatch.setattr(node, "computed", lambda layer, *rest: (told.append(layer), computed(layer, *rest)))
    both.finish(name)
    assert told == [1, 1, 1]
    assert both.decode.computed(name) == 1 + 2


# The answer


def test_the_answer_has_nixls_keys_and_the_transfer(pair: MakePair) -> None:
    both = pair({"tp_size": 2})
    answer = both.handed_over(PROMPT)
    transfer_id = answer.pop("transfer_id")
    assert isinstance(transfer_id, str) and len(transfer_id) == 32
    assert answer.pop("transfer_name").startswith(f"{transfer_id}:")
    assert len(answer["remote_block_ids"][0]) == 6
    assert {key: value for key, value in answer.items() if key != "remote_block_ids"} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": both.prefill.pd._engine_id,
        "remote_request_id": "r0",
        "remote_host": "127.0.0.1",
        "remote_port": both.prefill.pd._directory.port,
        "tp_size": 2,
        "pp_size": 1,
        "remote_num_tokens": NUM_TOKENS,
        "remote_prefill_cached_tokens": 0,
    }


def test_an_ordinary_request_has_no_answer_and_holds_nothing(pair: MakePair) -> None:
    both = pair()
    for params in (None, {}, {"do_remote_decode": False}, {"something": "else"}):
        name = both.prefill.add(PROMPT, 3, params=params)
        both.run()
        assert both.prefill.answers[name] is None
    both.prefill.check_at_rest()


@every_runner
def test_a_first_token_that_stops_hands_over_as_well(pair: MakePair) -> None:
    """Trap of other connectors: the request then ends as `stop`, not as `length`."""
    both = pair()
    answer = both.handed_over(PROMPT, 5, stop=oracle.generate(PROMPT, 1))
    assert both.prefill.reasons[last(both.prefill)] == "stop"
    both.finish(both.decode.add(PROMPT, 3, params=answer), computed=1 + 2)


@every_runner
def test_a_prefill_leg_may_answer_more_than_one_token(pair: MakePair) -> None:
    """What it computed beyond the prompt stays where it is."""
    both = pair()
    answer = both.handed_over(PROMPT, 20)
    both.finish(both.decode.add(PROMPT, 30, params=answer), computed=1 + 29)


# Blocks


@every_runner
@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_are_held_until_the_consumer_has_them(pair: MakePair, aborted: bool) -> None:
    """An abort after the end changes nothing."""
    both = pair()
    answer = both.handed_over(PROMPT)
    if aborted:
        both.prefill.abort(last(both.prefill))
    both.prefill.steps(20)
    assert both.prefill.free_blocks() == 63 - 6
    both.finish(both.decode.add(PROMPT, 3, params=answer), computed=1 + 2)


def test_blocks_that_nobody_asks_for_are_held_for_the_lease(pair: MakePair) -> None:
    both = pair(transfer_lease_s=1)
    both.handed_over(PROMPT)
    assert both.prefill.free_blocks() == 63 - 6
    both.run()
    assert both.failures() == {"send_expired": 1}
    both.prefill.check_at_rest()
    both.prefill.wait_until_forgotten()


@every_runner
def test_out_of_blocks_prefill_waits_for_those_that_are_held(pair: MakePair) -> None:
    """Room for two prompts: the third is computed once a consumer has the first."""
    both = pair({"num_blocks": 14, "prefix_caching": False})
    answers = [both.handed_over([number, *PROMPT]) for number in range(2)]
    third = both.prefill.add([2, *PROMPT], 1, params=prefill_params())
    both.prefill.steps(20)
    assert both.prefill.computed(third) == 0
    names = [both.decode.add([0, *PROMPT], 3, params=answers[0])]
    run_all(*both.both, until=lambda: third in both.prefill.reasons)
    names += [
        both.decode.add([number, *PROMPT], 3, params=params)
        for number, params in [(1, answers[1]), (2, both.prefill.answers[third])]
    ]
    both.finish()
    assert [both.decode.computed(name) for name in names] == [1 + 2] * 3


# Ends that come too early


@every_runner
@pytest.mark.parametrize("sent_again", [False, True])
def test_an_abort_before_any_worker_knows(pair: MakePair, sent_again: bool) -> None:
    """A decode instance that has announced itself is told, rather than left to its deadline.

    The transfer ends with the first leg, also where another one follows.
    """
    both = pair()
    name = both.add_granted(PROMPT)
    both.prefill.abort(last(both.prefill))
    if sent_again:
        both.prefill.add(PROMPT, 1, params=prefill_params("x"))
    both.finish(name, computed=NUM_TOKENS + 2)


@every_runner
def test_an_id_used_again_before_any_worker_knew_of_the_first_request(pair: MakePair) -> None:
    """vLLM leaves clients' ids as they are under VLLM_DISABLE_REQUEST_ID_RANDOMIZATION; a word is about one request."""
    both = pair()
    for _ in range(2):
        both.prefill.abort(both.prefill.add(PROMPT, 1, params=prefill_params(), name="x"))
    both.prefill.add(PROMPT, 1, params=prefill_params(), name="x")
    both.ask([1, *PROMPT])
    both.prefill.check_answer("x")
    assert both.prefill.answers["x"] is None
    assert not both.failures()


@every_runner
def test_an_abort_while_waiting_for_blocks(pair: MakePair) -> None:
    both = pair({"num_blocks": 8, "prefix_caching": False})
    long = both.prefill.add(PROMPT, 20)
    both.prefill.step()
    name = both.add_granted(PROMPT)
    both.prefill.steps(3)
    assert both.prefill.computed(last(both.prefill)) == 0
    both.prefill.abort(last(both.prefill))
    both.finish(name, computed=NUM_TOKENS + 2)
    both.prefill.check_answer(long)


@every_runner
@pytest.mark.parametrize("granularity", ["full", "layer"])
def test_an_abort_in_mid_prefill(pair: MakePair, granularity: str) -> None:
    both = pair(CHUNKED, granularity=granularity)
    name = both.add_computed()
    both.prefill.abort(last(both.prefill))
    both.finish(name, computed=NUM_TOKENS + 2)


@every_runner
def test_an_abort_in_mid_prefill_before_anybody_asked(pair: MakePair) -> None:
    both = pair(CHUNKED)
    leg = both.prefill.add(PROMPT, 1, params=prefill_params())
    run_all(both.prefill, until=lambda: both.prefill.computed(leg) == 32)
    both.prefill.abort(leg)
    both.finish()
    assert both.prefill.answers[leg] is None


# Preemption


@every_runner
@every_order
def test_prefill_preempted_before_anything_was_sent_hands_over_all_the_same(pair: MakePair, order: str) -> None:
    both = pair(CHUNKED, granularity="full")
    if order == "concurrent":
        name = both.add_granted(PROMPT)
    else:
        both.prefill.add(PROMPT, 1, params=prefill_params())
    leg = last(both.prefill)
    run_all(*both.both, until=lambda: both.prefill.computed(leg) >= 32)
    both.prefill.preempt()
    run_all(*both.both, until=lambda: leg in both.prefill.reasons)
    assert both.prefill.requests[leg].num_preemptions == 1
    if order == "sequential":
        name = both.decode.add(PROMPT, 3, params=both.prefill.answers[leg])
    both.finish(name, computed=1 + 2)


@every_runner
@pytest.mark.parametrize("granularity", ["chunk", "layer"])
def test_prefill_preempted_after_something_was_sent_is_computed_by_decode(pair: MakePair, granularity: str) -> None:
    both = pair(CHUNKED, granularity=granularity)
    name = both.add_computed()
    wait_for(lambda: any(part.sent for one in transfers_of(both.prefill) for part in list(one.sessions.values())))
    both.prefill.preempt()
    both.finish(name, computed=NUM_TOKENS + 2)
    assert both.prefill.requests[last(both.prefill)].num_preemptions == 1


@every_runner
def test_blocks_that_another_request_gets_while_they_are_sent_do_not_count(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is in the middle of its first batch, and goes on when the blocks hold another prompt's KV."""
    begun, go_on = threading.Event(), threading.Event()
    send = transfer.serving._send

    def slow(*args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return send(*args)

    monkeypatch.setattr(transfer.serving, "_send", slow)
    both = pair(CHUNKED | {"num_blocks": 10, "prefix_caching": False}, granularity="layer")
    name = both.add_granted(PROMPT)
    run_all(*both.both, until=lambda: both.prefill.computed(last(both.prefill)) >= 32)
    wait_for(begun.is_set)
    both.prefill.preempt()
    both.prefill.abort(last(both.prefill))
    other = both.prefill.add([5] * 100, 20)
    run_all(both.prefill, until=lambda: other in both.prefill.reasons)
    go_on.set()
    both.finish(name, computed=NUM_TOKENS + 2)
    both.prefill.check_answer(other)


def pushed_out(both: Pair) -> str:
    """A prefill leg whose only token is under way when another request wants its blocks."""
    both.prefill.add(PROMPT[:15], 5)  # one block, until it needs the second in its third step
    both.prefill.step()
    leg = both.prefill.add(PROMPT, 1, params=prefill_params())
    run_all(both.prefill, until=lambda: leg in both.prefill.reasons)
    return leg


IN_FLIGHT = {"num_blocks": 8, "prefix_caching": False, "async_scheduling": True}


def within(role: str, pool: Path) -> dict[str, Any]:
    """Ours in that role inside a MultiConnector that is a producer, whose requests vLLM preempts while under way."""
    ours = transfer_config(Setup(kv_role=role, extra=PD_ONLY), pool)
    return {"transfer": multi_connector(ours, role="kv_producer")}


@pytest.mark.parametrize(("role", "preempted"), [("kv_producer", 1), ("kv_both", 0), ("kv_both within a producer", 1)])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("v2", [False, True])
def test_prefill_preempted_while_its_token_is_under_way_hands_over_all_the_same(
    pair: MakePair, pool: Path, role: str, preempted: int, v2: bool, lazy: bool
) -> None:
    """vLLM ends such a request on the token that was under way, without KV, unless the connector requires delivery.

    An instance that may be a consumer preempts no request that is under way.
    """
    roles = {"kv_role": role} if " " not in role else within("kv_both", pool)
    both = pair(IN_FLIGHT | roles | {"v2_runner": v2, "lazy": lazy})
    leg = pushed_out(both)
    assert both.prefill.requests[leg].num_preemptions == preempted
    answer = both.prefill.answers[leg]
    assert answer is not None, "the KV is lost"
    both.finish(both.decode.add(PROMPT, 3, params=answer), computed=1 + 2)
    assert not both.failures()


def test_a_hand_over_that_is_lost_to_a_preemption_is_counted_and_said(
    pair: MakePair, pool: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `kv_consumer` delivery is not required: such an instance is not meant to give KV away."""
    both = pair(IN_FLIGHT | within("kv_consumer", pool))
    assert both.prefill.answers[pushed_out(both)] is None
    both.finish()
    assert both.failures() == {"send_preempted": 1}
    assert sum("kv_producer or kv_both" in one.getMessage() for one in caplog.records) == 1


@every_runner
def test_prefill_legs_that_push_each_other_out(pair: MakePair) -> None:
    """Preempted by vLLM itself, out of blocks; every answer is right, and nothing is held at the end."""
    both = pair(CHUNKED | {"num_blocks": 16, "prefix_caching": False}, granularity="chunk")
    names = [both.add([number, *PROMPT], 3, order="concurrent") for number in range(6)]
    for number, name in enumerate(names):
        run_all(*both.both, until=lambda name=name: name in both.decode.reasons)
        assert both.decode.texts[name] == oracle.generate([number, *PROMPT], 3)
    both.finish()
