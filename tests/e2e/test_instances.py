"""Several instances, one pool: of one rank beside one of two.

Tensor-parallel ranks save and load their own halves of pages, and put pages together from those of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import Shared, StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import SMALLEST_GAP, Question
from e2e.server import Server
from models import checkpoint
from store_client import EmbeddedStore

SALT = "instances"  # other modules ask the same in this pool


@pytest.fixture(scope="module")
def pool(shared: Shared) -> Path:
    return shared.pool


@pytest.fixture(scope="module")
def one(shared: Shared) -> Server:
    return shared.server


@pytest.fixture(scope="module")
def two(one: Server, start: StartServer, qwen3: Path) -> Server:
    """A server of two ranks beside that of one."""
    return start(qwen3, "--tensor-parallel-size", "2", "--max-model-len", "2048")


@pytest.fixture
def updated(two: Server, one: Server, qwen3: Path) -> Iterator[None]:
    """Both servers were given the same new weights; the one that others use gets its own back."""
    for server in (one, two):
        server.load_weights(checkpoint("qwen3-other"))
    yield
    one.load_weights(qwen3)


def ask(server: Server, question: Question) -> int:
    """Ask with an empty cache of the engine's own, check the answer, and return how many tokens were not computed."""
    server.reset_prefix_cache()
    answer = server.ask(question.prompt, max_tokens=len(question.answer), cache_salt=SALT)
    assert answer.token_ids == question.answer
    return answer.cached_tokens


def computes(server: Server, question: Question, pool: Path) -> None:
    """The question's pages are not in the pool, and are afterwards."""
    assert ask(server, question) == 0
    Pages(pool, server.model, lambda: server).wait_for(question.prompt, cache_salt=SALT)


def loads(server: Server, question: Question, pool: Path) -> None:
    """From the pool: with other bytes there the answer is another one."""
    full = question.num_full_pages * PAGE_TOKENS
    assert ask(server, question) == full
    server.reset_prefix_cache()
    Pages(pool, server.model).falsify(question.prompt, page=3, cache_salt=SALT)
    falsified = server.ask(question.prompt, max_tokens=len(question.answer), cache_salt=SALT)
    assert falsified.cached_tokens == full
    assert falsified.token_ids != question.answer


def test_two_ranks_reuse_their_halves_of_the_pages(
    questions: dict[str, Question], two: Server, pool: Path
) -> None:
    with EmbeddedStore(pool) as store:
        before = {(info.namespace.digest, info.shard) for info in store.namespaces()}
    computes(two, questions["number 0"], pool)
    with EmbeddedStore(pool) as store:
        now = [info for info in store.namespaces() if (info.namespace.digest, info.shard) not in before]
    assert sorted((info.shard.head_start, info.shard.head_stop) for info in now) == [(0, 2), (2, 4)]
    loads(two, questions["number 0"], pool)


@pytest.mark.parametrize("writer", ["two", "one"])
def test_instances_of_one_and_two_ranks_read_each_others_pages(
    writer: str, questions: dict[str, Question], one: Server, two: Server, pool: Path
) -> None:
    question = questions["number 1" if writer == "two" else "number 2"]
    here, there = (two, one) if writer == "two" else (one, two)
    computes(here, question, pool)
    loads(there, question, pool)


@pytest.mark.parametrize("writer", ["two", "one"])
def test_instances_with_the_same_new_weights_share_again(
    writer: str, updated: None, questions: dict[str, Question], one: Server, two: Server, pool: Path
) -> None:
    here, there = (two, one) if writer == "two" else (one, two)
    for name in (name for name in questions if name.startswith("number")):
        prompt, max_tokens, salt = questions[name].prompt, len(questions[name].answer), f"new weights of {writer}"
        here.reset_prefix_cache()
        computed = here.ask(prompt, max_tokens=max_tokens, cache_salt=salt)
        assert computed.cached_tokens == 0
        if computed.smallest_gap >= SMALLEST_GAP and computed.token_ids != questions[name].answer:
            break
    else:
        raise AssertionError("no question has an answer of the new weights with a clear margin")
    pages = Pages(pool, here.model, lambda: here)
    pages.wait_for(prompt, cache_salt=salt)
    there.reset_prefix_cache()
    loaded = there.ask(prompt, max_tokens=max_tokens, cache_salt=salt)
    assert loaded.cached_tokens == questions[name].num_full_pages * PAGE_TOKENS
    assert loaded.token_ids == computed.token_ids

    there.reset_prefix_cache()
    pages.falsify(prompt, page=3, cache_salt=salt)
    falsified = there.ask(prompt, max_tokens=max_tokens, cache_salt=salt)
    assert falsified.cached_tokens == loaded.cached_tokens
    assert falsified.token_ids != computed.token_ids


def test_pages_of_the_weights_before_come_back_with_them_alone(
    questions: dict[str, Question], one: Server, qwen3: Path, pool: Path
) -> None:
    question = questions["number 4"]
    computes(one, question, pool)
    one.load_weights(checkpoint("qwen3-other"))
    try:
        one.reset_prefix_cache()
        assert one.ask(question.prompt, cache_salt=SALT).cached_tokens == 0
    finally:
        one.load_weights(qwen3)
    loads(one, question, pool)
