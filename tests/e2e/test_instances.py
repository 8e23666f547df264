"""Several instances, one pool: at the same time, one life after the other, and beside another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from long_form import LONG

from e2e.conftest import QWEN3_ARGS, Shared, StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question
from e2e.server import Server
from models import checkpoint

TURNS = ("first to second", "second to first")
SALT = "instances"  # other modules ask the same in this pool


@pytest.fixture(scope="module")
def first(shared: Shared) -> Server:
    return shared.server


@pytest.fixture(scope="module")
def pool(shared: Shared) -> Path:
    return shared.pool


@pytest.fixture(scope="module")
def second(first: Server, start: StartServer, qwen3: Path) -> Server:
    return start(qwen3, *QWEN3_ARGS)


def ask(server: Server, question: Question) -> int:
    """Ask, check the answer, and return how many prompt tokens were not computed."""
    answer = server.ask(question.prompt, max_tokens=len(question.answer), cache_salt=SALT)
    assert answer.token_ids == question.answer
    return answer.cached_tokens


@pytest.mark.parametrize("turn", TURNS)
def test_two_running_instances_read_each_others_pages(
    turn: str, first: Server, second: Server, questions: dict[str, Question], pool: Path
) -> None:
    writer, reader = (first, second) if turn == "first to second" else (second, first)
    question = questions[f"number {TURNS.index(turn)}"]
    assert ask(writer, question) == 0
    Pages(pool, writer.model, lambda: writer).wait_for(question.prompt, cache_salt=SALT)
    assert ask(reader, question) == question.num_full_pages * PAGE_TOKENS


# The demo stops its server and starts it again.
ENDS = {"number 2": Server.kill, **({"number 3": Server.stop} if LONG else {})}


@pytest.mark.long
@pytest.mark.parametrize(("name", "end"), ENDS.items(), ids=[end.__name__ for end in ENDS.values()])
def test_the_next_life_of_an_instance_finds_its_pages(
    name: str, end: Callable[[Server], None], second: Server, questions: dict[str, Question], pool: Path
) -> None:
    question = questions[name]
    assert ask(second, question) == 0
    Pages(pool, second.model, lambda: second).wait_for(question.prompt, cache_salt=SALT)
    end(second)
    second.start()
    second.wait_until_ready()
    assert ask(second, question) == question.num_full_pages * PAGE_TOKENS


def test_two_models_of_one_architecture_do_not_read_each_others_pages(
    first: Server, start: StartServer, questions: dict[str, Question], pool: Path
) -> None:
    question = questions["number 4"]
    assert ask(first, question) == 0
    Pages(pool, first.model, lambda: first).wait_for(question.prompt, cache_salt=SALT)

    other = start(checkpoint("qwen3-other"), *QWEN3_ARGS)
    theirs = other.ask(question.prompt, max_tokens=len(question.answer), cache_salt=SALT)
    assert theirs.cached_tokens == 0
    assert theirs.token_ids != question.answer

    Pages(pool, other.model, lambda: other).wait_for(question.prompt, cache_salt=SALT)
    first.reset_prefix_cache()
    assert ask(first, question) == question.num_full_pages * PAGE_TOKENS
