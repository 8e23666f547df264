"""Hours in short: traffic with aborts, after which the servers are as large as before."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from long_form import LONG

from e2e.growth import Size, assert_not_grown, sizes
from e2e.pd.conftest import ORDERS, Trio
from e2e.pd.instances import Instance, Proxy
from e2e.questions import Question, draw_tokens

WARM_UP_S, SECONDS = (60.0, 900.0) if LONG else (10.0, 20.0)
AT_ONCE = 4
FILLERS = 80
"""More batch sizes than vLLM keeps oneDNN primitives for in each layer; a new block for each is more than there are."""
MOST_GROWTH_NBYTES = 24 << 20
"""Of a process. In the long form one layer of KV kept of each request is over twice as much on a busy machine."""


@pytest.mark.long
def test_traffic_leaves_no_memory_descriptors_or_threads_behind(
    trio: Trio, asked: dict[str, Question], logs: Path
) -> None:
    """What is used for the first time grows a process once: KV blocks, batch sizes, connections between all pairs."""
    first, second, third = trio.instances
    proxies = [trio.proxy([one], [two], order=order) for one, two in ((first, second), (second, third), (third, first))
               for order in ORDERS]  # fmt: skip
    crowd = [question for name, question in asked.items() if name.startswith("crowd")]
    source = random.Random(5)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(fill, trio.instances))
        list(threads.map(lambda both: answers(*both), [(proxy, question) for proxy in proxies for question in crowd]))
    traffic(proxies, crowd, source, WARM_UP_S)

    before, fetched = [settled(instance) for instance in trio.instances], fetched_tokens(trio)
    answered, abandoned = traffic(proxies, crowd, source, SECONDS)
    after = [settled(instance) for instance in trio.instances]
    fetched = fetched_tokens(trio) - fetched
    summary = f"{SECONDS:.0f} s: {answered} requests answered, {abandoned} abandoned, {fetched:.0f} tokens fetched"
    report = logs / "endurance.md"
    assert_not_grown(
        trio.instances, before, after, most_nbytes=MOST_GROWTH_NBYTES, summary=summary, report=report
    )
    assert answered > 0
    assert fetched > 0


def fill(instance: Instance) -> None:
    """Use all its KV memory, and fill its caches of batch sizes."""
    source = random.Random(7)
    for number in range(FILLERS):
        instance.ask_whole(draw_tokens(source, 129 + number), max_tokens=1)


def traffic(proxies: list[Proxy], questions: list[Question], source: random.Random, seconds: float) -> tuple[int, int]:
    """Ask these at random, a fifth of them in vain: (number answered, number abandoned)."""
    end = time.monotonic() + seconds

    def client(seed: int) -> tuple[int, int]:
        draw, answered, abandoned = random.Random(seed), 0, 0
        while time.monotonic() < end:
            proxy, question = draw.choice(proxies), draw.choice(questions)
            if draw.random() < 0.2:
                proxy.abandon(question.prompt, after_s=draw.uniform(0, 1))
                abandoned += 1
            else:
                answers(proxy, question, salt=draw.choice([None, f"{draw.random()}"]))
                answered += 1
        return answered, abandoned

    with ThreadPoolExecutor(AT_ONCE) as threads:
        done = list(threads.map(client, [source.randrange(1 << 30) for _ in range(AT_ONCE)]))
    return sum(answered for answered, _ in done), sum(abandoned for _, abandoned in done)


def answers(proxy: Proxy, question: Question, *, salt: str | None = None) -> None:
    """With a new `salt` all of the prompt is computed and fetched, whatever either instance has cached."""
    more = {} if salt is None else {"cache_salt": salt}
    choice = proxy.post(proxy.body(question.prompt, len(question.answer), **more))["choices"][0]
    assert tuple(choice["token_ids"]) == question.answer


def fetched_tokens(trio: Trio) -> float:
    return sum(instance.figure("fetched_tokens") for instance in trio.instances)


def settled(instance: Instance) -> dict[int, Size]:
    """Every process when nothing is under way."""
    instance.holds_no_block()
    return sizes(instance)
