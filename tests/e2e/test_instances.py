"""Several instances, one pool: at the same time, one life after the other, and beside another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from long_form import LONG

from e2e.conftest import QWEN3_ARGS, StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question
from e2e.server import Server
from models import checkpoint


@pytest.fixture(scope="module")
def first(questions: dict[str, Question], start: StartServer, qwen3: Path) -> Server:
    return start(qwen3, *QWEN3_ARGS)


@pytest.fixture(scope="module")
def second(first: Server, start: StartServer, qwen3: Path) -> Server:
    return start(qwen3, *QWEN3_ARGS)


def ask(server: Server, question: Question) -> int:
    """Ask, check the answer, and return how many prompt tokens were not computed."""
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert answer.token_ids == question.answer
    return answer.cached_tokens


@pytest.mark.parametrize("turn", ["first to second", "second to first"])
def test_two_running_instances_read_each_others_pages(
    turn: str, first: Server, second: Server, questions: dict[str, Question], pool: Path
) -> None:
    writer, reader = (first, second) if turn == "first to second" else (second, first)
    question = questions[turn]
    assert ask(writer, question) == 0
    Pages(pool, writer.model).wait_for(question.prompt)
    assert ask(reader, question) == question.num_full_pages * PAGE_TOKENS


# The demo stops its server and starts it again.
ENDS = {"killed": Server.kill, **({"stopped": Server.stop} if LONG else {})}


@pytest.mark.long
@pytest.mark.parametrize(("name", "end"), ENDS.items())
def test_the_next_life_of_an_instance_finds_its_pages(
    name: str, end: Callable[[Server], None], second: Server, questions: dict[str, Question], pool: Path
) -> None:
    question = questions[name]
    assert ask(second, question) == 0
    Pages(pool, second.model).wait_for(question.prompt)
    end(second)
    second.start()
    second.wait_until_ready()
    assert ask(second, question) == question.num_full_pages * PAGE_TOKENS


def test_two_models_of_one_architecture_do_not_read_each_others_pages(
    first: Server, start: StartServer, questions: dict[str, Question], pool: Path
) -> None:
    question = questions["two models"]
    assert ask(first, question) == 0
    Pages(pool, first.model).wait_for(question.prompt)

    other = start(checkpoint("qwen3-other"), *QWEN3_ARGS)
    stranger = other.ask(question.prompt, max_tokens=len(question.answer))
    assert stranger.cached_tokens == 0
    assert stranger.token_ids != question.answer

    Pages(pool, other.model).wait_for(question.prompt)
    first.reset_prefix_cache()
    assert ask(first, question) == question.num_full_pages * PAGE_TOKENS
