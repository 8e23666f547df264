"""A server with so little KV memory that it preempts and evicts: its answers are right, an index knows what it still
has, and after its death its pages are there for others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from agent.asking import Client

from e2e.conftest import Shared, StartServer
from e2e.index import Asked, Endpoints, Relay, churn, knows, knows_nothing, losing_for_good, serving
from e2e.pages import PAGE_TOKENS, Pages, clear, wait_for
from e2e.questions import Question, draw_tokens
from e2e.server import Server

BLOCK_TOKENS = 128
"""vLLM's on a CPU."""
NUM_BLOCKS = 16

Prompt = tuple[int, ...]
Find = Callable[[Prompt], tuple[int, int]]


@pytest.fixture(scope="module")
def pool(shared: Shared) -> Path:
    return shared.pool


@pytest.fixture(scope="module")
def endpoints() -> Endpoints:
    return Endpoints()


@pytest.fixture(scope="module")
def small(shared: Shared, start: StartServer, qwen3: Path, endpoints: Endpoints) -> Server:
    blocks = str(NUM_BLOCKS + 1)  # one is vLLM's own
    events = endpoints.config(enable_kv_cache_events=True)
    return start(
        qwen3, "--max-model-len", "1024", "--num-gpu-blocks-override", blocks, "--kv-events-config", events
    )


@pytest.fixture(scope="module")
def pages(small: Server, pool: Path) -> Pages:
    return Pages(pool, small.model, lambda: small)


def test_answers_are_right_under_preemption(small: Server, pages: Pages, questions: dict[str, Question]) -> None:
    """Five prompts of 382 tokens fill three blocks of 128 each, and need a fourth after two more tokens.

    Saves may pin a part of so few blocks only, so a crowd's pages are not all saved; those of one request alone are.
    """
    crowd, salt = [question for name, question in questions.items() if name.startswith("number")], "preemption"

    def answers(question: Question) -> bool:
        answer = small.ask(question.prompt, max_tokens=len(question.answer), cache_salt=salt)
        return answer.token_ids == question.answer

    for _ in range(4):
        with ThreadPoolExecutor(len(crowd)) as threads:
            assert all(threads.map(answers, crowd))
        small.reset_prefix_cache()  # every block has come back
    for question in crowd:
        assert answers(question)
        pages.wait_for(question.prompt, cache_salt=salt)
        small.reset_prefix_cache()

    assert small.metric("vllm:num_preemptions_total") > 0
    assert small.tokens_from_connector() > 0


# What an agent's index says of it, over HTTP.


@pytest.fixture(scope="module")
def agent(small: Server, pages: Pages, pool: Path, logs: Path) -> Iterator[Client]:
    first = draw_tokens(random.Random(40), 2 * PAGE_TOKENS)  # its pages say what the pool calls the model
    small.compute(first)
    pages.wait_for(first)
    with serving(pool, logs / "evictions-agent.log") as client:
        yield client


@pytest.fixture(scope="module")
def index(agent: Client, small: Server, endpoints: Endpoints) -> Iterator[Asked]:
    """All that comes to it comes through a relay; what that loses is replayed."""
    with closing(Relay(endpoints.events)) as relay:
        yield registered(agent, small, "relayed", relay, endpoint=relay.endpoint, replay_endpoint=endpoints.replay)


def registered(agent: Client, server: Server, name: str, relay: Relay, **fields: str) -> Asked:
    assert "remark" not in agent.register(name, modelname=server.model.name, **fields)
    return Asked(agent, server.model.name, name, relay)


@pytest.fixture(scope="module")
def find(small: Server, pages: Pages) -> Find:
    """Asks for a prompt: tokens that the server has found on its device, and in all. Then the pool has all pages."""
    counter = "vllm:prompt_tokens_by_source_total"

    def find(prompt: Prompt) -> tuple[int, int]:
        before, loaded = small.metric(counter), small.tokens_from_connector()
        found = small.ask(prompt, max_tokens=1).cached_tokens
        wait_for(lambda: small.metric(counter) >= before + len(prompt), "the prompt in the server's figures")
        loaded = small.tokens_from_connector() - loaded
        pages.wait_for(prompt)
        return found - loaded, found

    return find


def test_under_churn_the_index_knows_what_the_server_finds_though_messages_are_lost(
    small: Server, index: Asked, find: Find, pool: Path
) -> None:
    """Prompts of some 4,000 tokens in all for 2,048 on the device; the pool has all of them until it is cleared."""
    draw = random.Random(41)
    trunks = [draw_tokens(draw, 320) for _ in range(2)]
    prompts = [trunks[number % 2] + draw_tokens(draw, 150 + 37 * number) for number in range(8)]

    def reset() -> None:
        small.reset_prefix_cache()
        small.ask(prompts[0][:40], max_tokens=1)  # vLLM tells of it with its next step
        knows_nothing(index, prompts, "GPU")

    def empty() -> None:
        clear(pool)
        assert not any(index.of(prompt, "CPU") for prompt in prompts)

    def forget() -> None:
        empty()
        reset()
        knows_nothing(index, prompts)

    churn(index, prompts, find, {4: reset, 10: empty, 16: forget}, draw=draw, block_tokens=BLOCK_TOKENS, steps=24)


def test_what_nobody_replays_is_not_claimed_nor_what_was_known_before(
    small: Server, agent: Client, index: Asked, find: Find, endpoints: Endpoints
) -> None:
    with closing(Relay(endpoints.events)) as relay:
        deaf = registered(agent, small, "deaf", relay, endpoint=relay.endpoint)
        losing_for_good(deaf, index, find, draw=random.Random(42), block_tokens=BLOCK_TOKENS)


def test_what_was_known_of_a_server_ends_with_it_but_for_what_is_in_the_pool(
    small: Server, agent: Client, index: Asked, find: Find, endpoints: Endpoints, shared: Shared
) -> None:
    """Killed, and started again: one instance's connection ends with it, the other's, to a relay, does not."""
    draw = random.Random(43)
    there, news = draw_tokens(draw, 330), draw_tokens(draw, 330)
    device, in_pool = 330 // BLOCK_TOKENS * BLOCK_TOKENS, 330 // PAGE_TOKENS * PAGE_TOKENS
    direct = registered(
        agent, small, "direct", index.relay, endpoint=endpoints.events, replay_endpoint=endpoints.replay
    )
    find(there)
    knows(direct, there, BLOCK_TOKENS)
    knows(index, there, BLOCK_TOKENS)
    small.kill()
    knows_nothing(direct, [there], "GPU")
    assert index.of(there, "GPU") == device, "a relay does not say that it hears nothing"
    assert direct.of(there, "CPU") == direct.of(there) == in_pool
    shared.server.reset_prefix_cache()
    assert shared.server.ask(there, max_tokens=1).cached_tokens == in_pool, "another instance finds what it stored"

    small.restart()
    find(news)
    for one in (direct, index):
        knows(one, news, BLOCK_TOKENS)
        assert one.of(there, "GPU") == 0
    assert index.counted("restarts")
    assert (direct.of(there, "GPU"), direct.of(there)) == (0, in_pool) == find(there)
    for one in (direct, index):
        knows(one, there, BLOCK_TOKENS)
    assert (device, in_pool) == (direct.of(there, "GPU"), direct.of(there)) == find(there)
