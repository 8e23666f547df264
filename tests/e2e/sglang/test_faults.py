"""A pool that fails, or seems to, under a running SGLang that waits for it without a limit of its own.

Every request is answered by recomputation; none hangs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.pool_faults import damage, lock_held
from e2e.questions import Question
from e2e.sglang.conftest import Attachable, StartSGLang, full, hit_tokens
from e2e.sglang_server import SGLangServer


@pytest.fixture(scope="module")
def server(attachable: Attachable) -> SGLangServer:
    attachable.be_attached()
    return attachable.server


@pytest.fixture(scope="module")
def pool(attachable: Attachable) -> Path:
    return attachable.pool


@pytest.fixture(scope="module")
def pages(pool: Path, server: SGLangServer) -> Pages:
    return Pages(pool, server.model, lambda: server)


def works_again(server: SGLangServer, question: Question) -> None:
    """What is asked is stored and loaded, sooner or later after a fault has gone."""
    wait_for(lambda: hit_tokens(server, question) == full(question), "a hit after the fault has gone")


def counted(server: SGLangServer, operation: str, cause: str) -> None:
    wait_for(
        lambda: server.metric("mooncake_connector_failures_total", operation=operation, cause=cause) >= 1,
        f"the failed {operation} in SGLang's metrics",
    )


def test_checksum_errors_on_every_page(
    server: SGLangServer, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    hit_tokens(server, question)
    pages.wait_for(question.prompt)
    damage(pool)
    assert hit_tokens(server, question) == 0
    counted(server, "load", "page_lost")
    works_again(server, question)


def test_a_page_that_is_gone_ends_the_prefix(
    server: SGLangServer, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    works_again(server, question)
    pages.remove(question.prompt, page=3)
    assert hit_tokens(server, question) == 3 * PAGE_TOKENS


def test_pool_deleted_under_the_engine(server: SGLangServer, pool: Path, questions: dict[str, Question]) -> None:
    question = questions["number 1"]
    hit_tokens(server, question)
    shutil.rmtree(pool)
    wait_for(
        lambda: hit_tokens(server, question) >= 0 and (pool / "pool.json").exists(),
        "a new pool in its place",
    )
    works_again(server, question)


def test_lock_held_by_a_stopped_process(server: SGLangServer, pool: Path, questions: dict[str, Question]) -> None:
    stored, question = questions["number 1"], questions["number 2"]
    works_again(server, stored)
    with lock_held(pool):
        assert hit_tokens(server, question) == 0
        assert hit_tokens(server, stored) == full(stored), "reading needs no lock"
        assert hit_tokens(server, question) == 0, "it could not be stored"
        counted(server, "save", "busy")
    works_again(server, question)


def test_sglangs_own_failure_injection(
    start: StartSGLang, questions: dict[str, Question]
) -> None:
    """A third of the calls fail, and each takes up to a twentieth of a second: some requests hit and some do not."""
    injected = start(
        env={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        }
    )
    assert "HiCache storage test injector enabled" in injected.log_text()
    asked = [questions[f"number {number}"] for number in range(4)]
    shares = [hit_tokens(injected, question) / full(question) for _ in range(8) for question in asked]
    assert max(shares) == 1
    assert shares[-16:].count(1) < 16
