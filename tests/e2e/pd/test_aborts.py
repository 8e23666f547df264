"""Clients that leave at any moment, beside others that stay, and resets: right answers, and blocks held no longer."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from long_form import LONG

from e2e.pages import wait_for
from e2e.pd.conftest import LEASE_S, ORDERS, Trio
from e2e.pd.half_way import LIMIT_S, half_way
from e2e.questions import Question

REQUESTS = 200 if LONG else 16
AT_ONCE = 8


@pytest.mark.long
def test_no_block_is_held_after_random_aborts(trio: Trio, asked: dict[str, Question]) -> None:
    first, second, third = trio.instances
    proxies = [trio.proxy([first, second], [third], order=order) for order in ORDERS]
    proxies += [trio.proxy([first], [second, third], order=order) for order in ORDERS]
    crowd = [question for name, question in asked.items() if name.startswith("crowd")]
    source = random.Random(4)
    plans = [
        (source.choice(proxies), source.choice(crowd), source.uniform(0, 2.5) if source.random() < 0.5 else None)
        for _ in range(REQUESTS)
    ]

    def attempt(number: int) -> bool:
        proxy, question, leaves_after_s = plans[number]
        if leaves_after_s is not None:
            proxy.abandon(question.prompt, after_s=leaves_after_s)
            return True
        return proxy.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer

    with ThreadPoolExecutor(AT_ONCE) as threads:
        outcomes = list(threads.map(attempt, range(REQUESTS)))
    assert outcomes == [True] * REQUESTS
    for instance in trio.instances:
        instance.holds_no_block()
        instance.reset_prefix_cache()  # vLLM refuses while a block is held
    assert sum(one.figure("fetched_tokens") for one in trio.instances) > 0


def test_a_reset_is_refused_while_a_hand_over_holds_blocks(trio: Trio, asked: dict[str, Question]) -> None:
    """By both instances, before vLLM asks the connector; at the latest the end of a lease makes it possible again."""
    prefill, decode = trio.pair("cma")
    proxy, question = trio.proxy([prefill], [decode]), asked["layer"]
    with half_way(proxy, prefill, question) as asking:
        assert not decode.resets() and not prefill.resets()
        prefill.heal()
        assert asking.result(LIMIT_S) == question.answer
    for instance in (decode, prefill):
        wait_for(instance.resets, f"a reset of {instance.log.stem}")

    leg = {"do_remote_decode": True, "do_remote_prefill": False}
    prefill.post(prefill.body(question.prompt, 1, kv_transfer_params=leg))
    assert not prefill.resets(), "nobody has asked for the KV yet"
    since_s = time.monotonic()
    wait_for(prefill.resets, "a reset after the lease", deadline_s=LIMIT_S)
    print(f"without a consumer a reset was refused for {time.monotonic() - since_s:.1f} s; the lease is {LEASE_S} s")
    prefill.holds_no_block()
