"""An engine that starts where no pool can be: it computes, says so of each request, and uses the pool once it can."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import QWEN3_ARGS, StartServer
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.questions import Question
from e2e.said import LOGS_REQUESTS, lines


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    """A file lies where the folder would be."""
    folder = Path(tempfile.mkdtemp(prefix="mooncake-connector-test-", dir="/dev/shm"))
    (folder / "pool").touch()
    yield folder / "pool"
    shutil.rmtree(folder, ignore_errors=True)


def test_a_request_misses_because_the_pool_is_unavailable(
    questions: dict[str, Question], start: StartServer, qwen3: Path, pool: Path
) -> None:
    server = start(qwen3, *QWEN3_ARGS, env=LOGS_REQUESTS)
    question = questions["number 0"]
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert (answer.token_ids, answer.cached_tokens) == (question.answer, 0)
    wait_for(lambda: len(lines(server)) > 0, "the request's line in the log")
    assert lines(server)[-1]["miss"] == "unavailable"

    pool.unlink()
    Pages(pool, server.model, lambda: server).wait_for(question.prompt)
    server.reset_prefix_cache()
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert (answer.token_ids, answer.cached_tokens) == (question.answer, question.num_full_pages * PAGE_TOKENS)
