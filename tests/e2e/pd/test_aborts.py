"""Clients that leave at any moment, beside others that stay: right answers, and no block held afterwards."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from long_form import LONG

from e2e.pd.conftest import ORDERS, Trio
from e2e.questions import Question

REQUESTS = 200 if LONG else 32
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
