"""Multi-head latent attention: one latent vector a token instead of heads, on a DeepSeek-V2 checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from e2e.conftest import StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.process import ENVIRONMENTS
from e2e.questions import Examiner, Question
from e2e.server import Server
from models import checkpoint

ARGS = ("--max-model-len", "2048", "--dtype", "bfloat16")


@pytest.fixture(scope="module")
def server(start: StartServer) -> Server:
    return start(checkpoint("deepseek-mla"), *ARGS)


@pytest.fixture(scope="module")
def question(server: Server) -> Question:
    """Of full pages and one token: vLLM's plain CPU kernels prefill latent attention from position 0 only.

    The server computed its answer under a salt of its own; `test_loaded_blocks.py` shows that a hit has the same bytes.
    """
    return Examiner(server, smallest_gap=0.12).question("latent", 5 * PAGE_TOKENS + 1)


def test_sglang_finds_the_latent_pages_that_vllm_computed(question: Question, server: Server, pool: Path) -> None:
    """Through SGLang's own controller and MLA host pool: SGLang has no attention for such a model without a GPU."""
    server.ask(question.prompt, max_tokens=1)
    Pages(pool, server.model, lambda: server).wait_for(question.prompt)
    tests = Path(__file__).resolve().parents[1]
    reader = subprocess.run(
        [
            ENVIRONMENTS / "sglang" / "bin" / "python",
            "-W",
            "ignore",
            tests / "sglang" / "latent_reader.py",
            pool,
            json.dumps(question.prompt),
        ],
        env={**os.environ, "PYTHONPATH": str(tests)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(reader.stdout.splitlines()[-1])
    assert found["loaded"] == question.num_full_pages * PAGE_TOKENS and found["loaded_of_another_prompt"] == 0
    assert found["latent_error"] < 0.005 and found["rope_error"] < 0.005
    assert found["rope_error_of_the_other_pairing"] > 0.02, "slow pairs hardly turn, whatever is paired"


def test_latent_pages_are_reused(question: Question, server: Server, pool: Path) -> None:
    pages = Pages(pool, server.model, lambda: server)
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
