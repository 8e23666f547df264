"""An engine with so little KV memory that it preempts: pages are saved, blocks are taken away, answers stay right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.conftest import StartServer
from e2e.pages import Pages
from e2e.questions import Question


def test_answers_are_right_under_preemption(
    questions: dict[str, Question], start: StartServer, qwen3: Path, pool: Path
) -> None:
    """Five prompts of 382 tokens fill three blocks of 128 each, and need a fourth after two more tokens.

    Saves may pin a part of so few blocks only, so a crowd's pages are not all saved; those of one request alone are.
    """
    server = start(qwen3, "--max-model-len", "1024", "--num-gpu-blocks-override", "17")
    pages = Pages(pool, qwen3, lambda: server)
    crowd = [question for name, question in questions.items() if name.startswith("number")]

    for _ in range(4):
        with ThreadPoolExecutor(len(crowd)) as threads:
            answers = list(threads.map(lambda q: server.ask(q.prompt, max_tokens=len(q.answer)), crowd))
        assert [answer.token_ids for answer in answers] == [question.answer for question in crowd]
        server.reset_prefix_cache()  # every block has come back
    for question in crowd:
        assert server.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
        pages.wait_for(question.prompt)
        server.reset_prefix_cache()

    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.tokens_from_connector() > 0
