"""Multi-head latent attention: one latent vector a token instead of heads, on a DeepSeek-V2 checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.conftest import StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.process import running
from e2e.questions import Examiner, Question
from e2e.server import Server
from models import checkpoint

ARGS = ("--max-model-len", "2048")


@pytest.fixture(scope="module")
def question(logs: Path) -> Question:
    """Of full pages and one token: vLLM's plain CPU kernels prefill latent attention from position 0 only."""
    plain = Server(checkpoint("deepseek-mla"), log=logs / "plain-latent.log", args=ARGS)
    with running(plain):
        return Examiner(plain, smallest_gap=0.12).question("latent", 5 * PAGE_TOKENS + 1)


def test_latent_pages_are_reused(question: Question, start: StartServer, pool: Path) -> None:
    server = start(checkpoint("deepseek-mla"), *ARGS)
    pages = Pages(pool, server.model)
    assert server.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
    pages.wait_for(question.prompt)

    server.reset_prefix_cache()
    again = server.ask(question.prompt, max_tokens=len(question.answer))
    assert again.token_ids == question.answer
    assert again.cached_tokens == question.num_full_pages * PAGE_TOKENS

    server.reset_prefix_cache()
    pages.falsify(question.prompt, page=2)
    falsified = server.ask(question.prompt, max_tokens=len(question.answer))
    assert falsified.cached_tokens == again.cached_tokens
    assert falsified.token_ids != question.answer
