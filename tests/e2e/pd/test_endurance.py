"""Hours in short: traffic with aborts, after which the servers are as large as before."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from e2e.pd.conftest import LONG, ORDERS, Trio
from e2e.pd.instances import Instance
from e2e.questions import Question

SECONDS = 900.0 if LONG else 20.0
AT_ONCE = 4
MOST_GROWTH_NBYTES = 256 << 20
"""The engine itself grows with every batch size that it meets first: torch alone by over a megabyte each (the caches of
oneDNN). Of this connector one layer of KV a request would be more."""
MOST_NEW_DESCRIPTORS = 4  # HTTP connections that are just being closed, and the like


def test_traffic_leaves_no_memory_descriptors_or_threads_behind(trio: Trio, asked: dict[str, Question]) -> None:
    """The first third warms up: connections between all pairs, allocator, caches."""
    first, second, third = trio.instances
    proxies = [trio.proxy([one], [two], order=order) for one, two in ((first, second), (second, third), (third, first))
               for order in ORDERS]  # fmt: skip
    crowd = [question for name, question in asked.items() if name.startswith("crowd")]
    source = random.Random(5)

    def traffic(seconds: float) -> int:
        end = time.monotonic() + seconds

        def client(seed: int) -> int:
            draw, answered = random.Random(seed), 0
            while time.monotonic() < end:
                proxy, question = draw.choice(proxies), draw.choice(crowd)
                if draw.random() < 0.2:
                    proxy.abandon(question.prompt, after_s=draw.uniform(0, 1))
                    continue
                answer = proxy.ask_whole(question.prompt, max_tokens=len(question.answer))
                assert answer == question.answer
                answered += 1
            return answered

        with ThreadPoolExecutor(AT_ONCE) as threads:
            return sum(threads.map(client, [source.randrange(1 << 30) for _ in range(AT_ONCE)]))

    assert traffic(SECONDS / 3) > 0
    before = [settled(instance) for instance in trio.instances]
    assert traffic(SECONDS) > 0
    after = [settled(instance) for instance in trio.instances]
    for old, new in zip(before, after, strict=True):
        assert new.keys() == old.keys(), "other processes than before"
        for pid, (_, descriptors, threads) in new.items():
            name = psutil.Process(pid).name()
            assert threads - old[pid][2] <= 0, f"{name} has {threads} threads, {old[pid][2]} before"
            assert descriptors - old[pid][1] <= MOST_NEW_DESCRIPTORS, f"{name} has {descriptors} descriptors"
        for pid, (nbytes, _, _) in new.items():
            grown = nbytes - old[pid][0]
            assert grown <= MOST_GROWTH_NBYTES, f"{psutil.Process(pid).name()} grew by {grown} bytes to {nbytes}"


def settled(instance: Instance) -> dict[int, tuple[int, int, int]]:
    """(bytes of its own, file descriptors, threads) of each process when nothing is under way."""
    instance.holds_no_block()
    return {process.pid: size(process) for process in instance.processes()}


def size(process: psutil.Process) -> tuple[int, int, int]:
    return process.memory_full_info().uss, process.num_fds(), process.num_threads()
