"""Load for minutes, with clients that leave and sides that are killed: right answers, and servers that do not grow."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from long_form import LONG

from e2e.client import ServerError
from e2e.pd_sglang.conftest import Asked, Pair
from e2e.pd_sglang.instances import Instance, Router

WARM_UP_S, SECONDS, KILLS = 120.0, 600.0, 8
AT_ONCE = 6
MOST_GROWTH_NBYTES = 48 << 20
MOST_NEW_DESCRIPTORS = 8

pytestmark = [pytest.mark.long, pytest.mark.skipif(not LONG, reason="it has a long form alone (`make test-long`)")]


def test_load_leaves_no_memory_descriptors_or_threads_behind(pair: Pair, asked: Asked) -> None:
    router = pair.router("sglang-router")
    assert traffic(router, asked, WARM_UP_S, may_fail=False) > 0
    before = [settled(instance) for instance in pair.instances]
    assert traffic(router, asked, SECONDS, may_fail=False) > 0
    after = [settled(instance) for instance in pair.instances]
    for old, new in zip(before, after, strict=True):
        assert new.keys() == old.keys(), "other processes than before"
        for pid, (nbytes, descriptors, threads) in new.items():
            name = psutil.Process(pid).name()
            grown = [now - then for now, then in zip((nbytes, descriptors, threads), old[pid], strict=True)]
            print(f"{name}: {grown[0]} bytes, {grown[1]} files, {grown[2]} threads more")
            assert grown[0] <= MOST_GROWTH_NBYTES, f"{name} grew by {grown[0]} bytes to {nbytes}"
            assert grown[1] <= MOST_NEW_DESCRIPTORS, f"{name} has {descriptors} files"
            assert grown[2] <= 0, f"{name} has {threads} threads"


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
    assert traffic(router, asked, 20.0, may_fail=False) > 0
    for instance in pair.instances:
        instance.holds_nothing()


def traffic(router: Router, asked: Asked, seconds: float, *, may_fail: bool, seed: int = 5) -> int:
    """Ask at random, a fifth in vain: how many requests were answered."""
    end = time.monotonic() + seconds

    def client(seed: int) -> int:
        source, answered = random.Random(seed), 0
        while time.monotonic() < end:
            question = source.choice(asked.crowd)
            try:
                if source.random() < 0.2:
                    router.leave(question.prompt, after_s=source.uniform(0, 1), max_tokens=64)
                    continue
                answer = router.ask_whole(question.prompt, max_tokens=len(question.answer))
            except (ServerError, OSError):
                if not may_fail:
                    raise
                time.sleep(0.2)
                continue
            assert answer == question.answer
            answered += 1
        return answered

    with ThreadPoolExecutor(AT_ONCE) as threads:
        return sum(threads.map(client, range(seed, seed + AT_ONCE)))


def settled(instance: Instance) -> dict[int, tuple[int, int, int]]:
    """Bytes, descriptors and threads of every process when nothing is under way."""
    instance.holds_nothing()
    return {
        process.pid: (process.memory_full_info().uss, process.num_fds(), process.num_threads())
        for process in instance.processes()
    }
