"""The decode instance: requests that end, wait or fail, and parameters that lead nowhere. It always answers."""

from __future__ import annotations

import socket
from typing import Any

import oracle
import pytest
from cases import Start, every_runner
from harness import Engine
from pd import (
    ORDERS,
    PD_ONLY,
    PROMPT,
    MakePair,
    Pair,
    decode_params,
    every_order,
    figures,
    granted,
    jobs,
    node_of,
    port_of,
    prefill_params,
    run_all,
)
from simulated.raw_peer import deaf
from simulated.waiting import wait_for

from transfer.protocol.incoming import Incoming
from transfer.protocol.orders import Ended, Ending
from transfer.protocol.outgoing import Outgoing

NUM_TOKENS = len(PROMPT)


def announced(engine: Engine) -> list[str]:
    return [name for step in engine.metadata for name in step.pd.announced]


def check_prefilled_here(engine: Engine, prompt: list[int], params: Any, **kwargs: Any) -> None:
    """A request is answered although nothing comes."""
    name = engine.add(prompt, 3, params=params, **kwargs)
    run_all(engine, until=lambda: name in engine.reasons)
    engine.check_answer(name, len(prompt) + 2)
    assert engine.reasons[name] == "length"


# Aborts


@every_runner
@every_order
def test_an_abort_before_anything_was_allocated_releases_prefill(pair: MakePair, order: str) -> None:
    both = pair()
    both.decode.abort(both.add(PROMPT, order=order))
    both.finish()


@every_runner
@every_order
def test_an_abort_while_waiting_for_blocks_releases_prefill(pair: MakePair, order: str) -> None:
    both = pair(decode={"num_blocks": 8, "prefix_caching": False})
    busy = both.decode.add([3] * 90, 20)
    both.decode.step()
    name = both.add(PROMPT, order=order)
    both.decode.steps(3)
    assert not jobs(both.decode)
    both.decode.abort(name)
    both.finish(busy)


@every_runner
def test_an_abort_while_fetching_frees_the_blocks_when_nothing_writes_to_them(pair: MakePair) -> None:
    both = pair({"max_num_batched_tokens": 32}, granularity="chunk")
    name = both.add_computed()
    both.decode.abort(name)
    assert both.decode.free_blocks() == 63 - 6
    both.finish()
    assert both.decode.texts[name] == []


@every_runner
def test_the_same_transfer_asked_for_again_while_the_aborted_one_is_not_over(pair: MakePair) -> None:
    both = pair()
    name = both.add_granted(PROMPT)
    both.decode.abort(name)
    again = both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "x"))
    both.finish(again)


@every_runner
def test_an_id_used_again_before_any_worker_knew_of_the_first_request(pair: MakePair) -> None:
    """vLLM leaves clients' ids as they are under VLLM_DISABLE_REQUEST_ID_RANDOMIZATION; a word is about one request."""
    both = pair()
    both.decode.abort(both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "first"), name="x"))
    both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "again"), name="x")
    both.ask([1, *PROMPT], computed=1 + 2)
    both.decode.check_answer("x")


@every_runner
def test_an_abort_while_decoding(pair: MakePair) -> None:
    both = pair()
    name = both.add(PROMPT, 50)
    run_all(*both.both, until=lambda: len(both.decode.texts[name]) > 2)
    both.decode.abort(name)
    both.finish()


# Waiting


@every_runner
def test_out_of_blocks_requests_wait_for_their_turn(pair: MakePair) -> None:
    both = pair({"num_blocks": 128}, {"num_blocks": 14, "prefix_caching": False})
    both.finish(*(both.add([number, *PROMPT], 8, order=ORDERS[number % 2]) for number in range(6)))
    assert figures(both.decode)["fetched_tokens"] == 6 * (NUM_TOKENS + 1)
    assert not both.failures()


@every_runner
def test_a_silent_prefill_instance_is_given_up_at_the_deadline(pair: MakePair) -> None:
    """It is there, and its leg never comes."""
    both = pair(transfer_deadline_s=0.2)
    check_prefilled_here(both.decode, PROMPT, decode_params(both.prefill, "never"))
    assert both.failures() == {"fetch_expired": 1}
    both.finish()


@every_runner
def test_a_host_that_accepts_and_says_nothing_is_given_up_at_the_deadline(start: Start) -> None:
    engine = start(extra=PD_ONLY | {"transfer_deadline_s": 0.2})
    with deaf() as (host, port):
        params = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": host, "remote_port": port}
        check_prefilled_here(engine, PROMPT, params)
    engine.finish()
    assert figures(engine)["failures"] == {"fetch_expired": 1}


@every_runner
def test_others_are_served_while_a_transfer_waits(pair: MakePair) -> None:
    both = pair()
    waiting = both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "later"))
    ordinary = both.decode.add([9, *PROMPT], 3)
    name = both.add([8, *PROMPT])
    run_all(*both.both, until=lambda: {ordinary, name} <= both.decode.reasons.keys())
    assert both.decode.computed(name) == 1 + 2
    both.prefill.add(PROMPT, 1, params=prefill_params("later"))
    both.finish(waiting, computed=1 + 2)


# After loading


@every_runner
def test_preempted_after_loading_it_computes_and_does_not_ask_again(pair: MakePair) -> None:
    both = pair(decode={"prefix_caching": False})
    name = both.add(PROMPT, 30)
    run_all(*both.both, until=lambda: len(both.decode.texts[name]) > 2)
    both.decode.preempt()
    both.finish(name)
    assert both.decode.computed(name) > NUM_TOKENS
    assert (len(announced(both.decode)), len(jobs(both.decode))) == (1, 1)
    assert not both.failures()


@every_runner
def test_late_and_repeated_endings_never_reach_the_scheduler(pair: MakePair) -> None:
    """vLLM's engine ends itself where it hears of a request that it does not know, or twice."""
    both = pair()
    name = both.ask(PROMPT, 3, computed=1 + 2)
    (transfer,) = {one.transfer for step in both.decode.metadata for one in step.pd.announced.values()}
    for ending in (Ending.DONE, Ending.FAILED):
        node_of(both.decode)._reports.put(Ended(Incoming(transfer, name, ending=ending)))
        node_of(both.prefill)._reports.put(Ended(Outgoing(transfer, "r0", ending=ending)))
    both.ask([1, *PROMPT], 3, computed=1 + 2)


@every_runner
def test_prompt_logprobs_need_all_of_the_prompt_so_prefill_is_released(pair: MakePair) -> None:
    """vLLM skips the lookup, though the connector is told of the request."""
    both = pair()
    name = both.add(PROMPT, 3, prompt_logprobs=1)
    both.finish(name, computed=NUM_TOKENS + 2)


# Failure


@every_runner
def test_a_failed_transfer_fails_the_request_where_the_user_says_so(pair: MakePair) -> None:
    both = pair(transfer_failure="fail")
    name = both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "x"))
    run_all(both.decode, until=lambda: granted(both.prefill))
    both.prefill.add(PROMPT, 1, params=prefill_params("x"))
    both.prefill.abort("r0")
    both.finish()
    assert both.decode.reasons[name] == "error"
    assert both.decode.texts[name] == []
    assert both.decode.ask(PROMPT, 3) == oracle.generate(PROMPT, 3)


@every_runner
def test_a_transfer_that_failed_while_its_request_waited_for_blocks_fails_it_as_well(pair: MakePair) -> None:
    both = pair(decode={"num_blocks": 8, "prefix_caching": False}, transfer_failure="fail")
    busy = both.decode.add([3] * 90, 20)
    both.decode.step()
    name = both.decode.add(PROMPT, 3, params=decode_params(both.prefill, "x") | {"remote_engine_id": "gone"})
    run_all(both.decode, until=lambda: both.decode.workers[0].pd._transfers)
    reports = node_of(both.decode)._reports
    wait_for(lambda: not reports.empty())  # without a step, in which the other request would go on
    run_all(both.decode, until=reports.empty)
    assert not jobs(both.decode)
    both.finish(busy)
    assert both.decode.reasons[name] == "error"


@every_runner
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]], ids=str)
def test_a_transfer_that_fails_on_some_ranks_is_computed_by_all(pair: MakePair, failing: list[int]) -> None:
    both = pair({"tp_size": 2}, {"tp_size": 2})
    answer = both.handed_over(PROMPT)
    for rank in failing:  # the prefill instance's rank gives up what this rank wants
        node = node_of(both.prefill, rank)
        known = node._serving.producer._transfers
        run_all(both.prefill, until=lambda known=known: any(one.spoken for one in list(known.values())))
        node.cancel(*node._serving.producer._transfers.values(), "test")
    both.finish(both.decode.add(PROMPT, 3, params=answer), computed=NUM_TOKENS + 2)


# Parameters that lead nowhere


@every_runner
def test_an_answer_used_a_second_time(pair: MakePair) -> None:
    both = pair(decode={"prefix_caching": False})
    answer = both.handed_over(PROMPT)
    both.finish(both.decode.add(PROMPT, 3, params=answer), computed=1 + 2)
    check_prefilled_here(both.decode, PROMPT, answer)
    both.finish()


def test_an_answer_after_its_lease(pair: MakePair) -> None:
    both = pair(transfer_lease_s=1)
    answer = both.handed_over(PROMPT)
    both.run()
    both.prefill.wait_until_forgotten()
    check_prefilled_here(both.decode, PROMPT, answer)
    both.finish()


@every_runner
def test_an_answer_for_another_prompt(pair: MakePair) -> None:
    """One token differs; the prefill instance waits for the right one."""
    both = pair()
    answer = both.handed_over(PROMPT)
    check_prefilled_here(both.decode, [*PROMPT[:-1], 5], answer)
    both.finish(both.decode.add(PROMPT, 3, params=answer))


@pytest.mark.parametrize(
    ("other", "request_like"),
    [({"model_id": "another"}, {}), ({"extra": {"model_id": "another"}}, {}), ({}, {"cache_salt": "mine"})],
    ids=["model by setting", "model by extra", "salt"],
)
def test_an_answer_for_another_model_or_salt(pair: MakePair, other: Any, request_like: Any) -> None:
    both = pair(decode=other, transfer_lease_s=1)
    check_prefilled_here(both.decode, PROMPT, both.handed_over(PROMPT), **request_like)
    both.finish()


@every_runner
def test_an_answer_of_an_earlier_life_on_the_same_port(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    prefill = start(extra=PD_ONLY | {"transfer_port": port})
    decode = start(prefix_caching=False, extra=PD_ONLY)
    first = Pair(prefill, decode)
    first.ask(PROMPT)
    stale = first.handed_over(PROMPT)
    prefill.shut_down()
    again = Pair(start(extra=PD_ONLY | {"transfer_port": port}), decode)
    assert port_of(again.prefill) == port
    check_prefilled_here(decode, PROMPT, stale)
    again.ask(PROMPT, computed=1 + 2)
    check_prefilled_here(decode, PROMPT, stale)
    again.finish()


def test_answers_of_an_earlier_life_do_not_disturb_transfers_under_way(pair: MakePair) -> None:
    """Clients send what they like; the connections to the instance that is there stay."""
    both = pair({"max_num_batched_tokens": 32}, granularity="chunk")
    name = both.add_computed()
    links = dict(node_of(both.decode)._fetching._links)
    stale = decode_params(both.prefill, "gone") | {"remote_engine_id": "gone", "remote_request_id": "r0"}
    check_prefilled_here(both.decode, [7, *PROMPT], stale)
    assert node_of(both.decode)._fetching._links == links
    both.finish(name, computed=1 + 2)


def test_nobody_listens(start: Start) -> None:
    engine = start(prefix_caching=False, extra=PD_ONLY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    params = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": port}
    for _ in range(3):
        check_prefilled_here(engine, PROMPT, params)
    engine.finish()
    assert figures(engine)["failures"] == {"fetch_failed": 3}


def test_an_instance_that_is_its_own_prefill_instance(start: Start) -> None:
    engine = start(extra=PD_ONLY, prefix_caching=False)
    both = Pair(engine, engine)
    name = both.add(PROMPT)
    run_all(engine)
    engine.check_answer(name, 1 + 2)
    engine.check_at_rest()
