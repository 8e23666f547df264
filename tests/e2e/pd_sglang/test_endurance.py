"""Load for minutes, with clients that leave and sides that are killed: right answers, and servers that do not grow."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from long_form import LONG

from e2e.client import ServerError
from e2e.growth import Size, assert_not_grown, sizes
from e2e.pd_sglang.conftest import Asked, Pair
from e2e.pd_sglang.instances import Instance, Router

WARM_UP_S, SECONDS, KILLS = 120.0, 600.0, 8
AT_ONCE = 6
MOST_GROWTH_NBYTES = 16 << 20
"""Of a process."""

pytestmark = [pytest.mark.long, pytest.mark.skipif(not LONG, reason="it has a long form alone (`make test-long`)")]


class Done(NamedTuple):
    """What came of a load; tokens are those of prompts and answers of the answered requests."""

    answered: int
    abandoned: int
    tokens: int


def test_load_leaves_no_memory_descriptors_or_threads_behind(pair: Pair, asked: Asked, logs: Path) -> None:
    router = pair.router("sglang-router")
    traffic(router, asked, WARM_UP_S, may_fail=False)
    before, fetched = [settled(instance) for instance in pair.instances], fetched_nbytes(pair)
    done = traffic(router, asked, SECONDS, may_fail=False)
    after, fetched = [settled(instance) for instance in pair.instances], fetched_nbytes(pair) - fetched
    summary = (
        f"{SECONDS:.0f} s: {done.answered} requests answered, {done.abandoned} abandoned, {done.tokens} tokens "
        f"in the answered ones, {fetched / 2**20:.0f} MB fetched"
    )
    report = logs / "endurance-sglang.md"
    assert_not_grown(
        pair.instances, before, after, most_nbytes=MOST_GROWTH_NBYTES, summary=summary, report=report
    )
    assert done.answered > 0
    assert fetched > 0


def test_sides_are_killed_at_random_under_load(pair: Pair, asked: Asked) -> None:
    """What is answered meanwhile is right; when both are back, everything is answered."""
    router, source, is_over = pair.router("sglang-router"), random.Random(9), threading.Event()

    def keep_asking(seed: int) -> None:
        while not is_over.is_set():
            traffic(router, asked, 1.0, may_fail=True, seed=seed)

    with ThreadPoolExecutor(2) as threads:
        asking = [threads.submit(keep_asking, seed) for seed in range(2)]
        try:
            for _ in range(KILLS):
                time.sleep(source.uniform(2, 10))
                victim = source.choice(pair.instances)
                victim.kill()
                time.sleep(source.uniform(0, 5))
                victim.restart()
        finally:
            is_over.set()
        for future in asking:
            future.result()
    time.sleep(5)  # the router looks every two seconds
    assert traffic(router, asked, 20.0, may_fail=False).answered > 0
    for instance in pair.instances:
        instance.holds_nothing()


def traffic(router: Router, asked: Asked, seconds: float, *, may_fail: bool, seed: int = 5) -> Done:
    """Ask at random, a fifth in vain."""
    end = time.monotonic() + seconds

    def client(seed: int) -> Done:
        source, answered, abandoned, tokens = random.Random(seed), 0, 0, 0
        while time.monotonic() < end:
            question = source.choice(asked.crowd)
            try:
                if source.random() < 0.2:
                    router.leave(question.prompt, after_s=source.uniform(0, 1), max_tokens=64)
                    abandoned += 1
                    continue
                answer = router.ask_whole(question.prompt, max_tokens=len(question.answer))
            except (ServerError, OSError):
                if not may_fail:
                    raise
                time.sleep(0.2)
                continue
            assert answer == question.answer
            answered, tokens = answered + 1, tokens + len(question.prompt) + len(answer)
        return Done(answered, abandoned, tokens)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return Done(*map(sum, zip(*threads.map(client, range(seed, seed + AT_ONCE)), strict=True)))


def fetched_nbytes(pair: Pair) -> float:
    return pair.decode.metric("mooncake_connector_transfer_bytes_total", operation="fetch")


def settled(instance: Instance) -> dict[int, Size]:
    """Every process when nothing is under way."""
    instance.holds_nothing()
    return sizes(instance)
