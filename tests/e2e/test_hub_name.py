"""`vllm serve owner/name`: the engine downloads what it reads of a repository, which is less than all of it."""

from __future__ import annotations

from pathlib import Path

from e2e.conftest import QWEN3_ARGS, StartServer
from e2e.hub import COMMIT, hub
from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question

NAME = Path("owner/qwen3")


def test_what_a_model_named_on_the_hub_computed_is_reused(
    questions: dict[str, Question], start: StartServer, qwen3: Path, pool: Path, tmp_path: Path
) -> None:
    question = questions["number 0"]
    with hub(str(NAME), qwen3) as endpoint:
        # A process of its own: one that is forked has read the variables of the hub's library before.
        settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "PYTHONPATH": ""}
        server = start(NAME, *QWEN3_ARGS, env=settings)
    downloaded = tmp_path / "hub" / "models--owner--qwen3" / "snapshots" / COMMIT
    assert (downloaded / "config.json").exists() and not (downloaded / "pytorch_model.bin").exists()
    assert server.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
    Pages(pool, NAME, lambda: server).wait_for(question.prompt)
    server.reset_prefix_cache()
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert (answer.token_ids, answer.cached_tokens) == (question.answer, question.num_full_pages * PAGE_TOKENS)
