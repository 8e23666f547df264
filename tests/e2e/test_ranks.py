"""Two tensor-parallel ranks: each saves and loads its own half of the KV heads."""

from __future__ import annotations

from pathlib import Path

from e2e.conftest import StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question
from store_client import EmbeddedStore


def test_two_ranks_reuse_their_halves_of_the_pages(
    questions: dict[str, Question], start: StartServer, qwen3: Path, pool: Path
) -> None:
    server = start(
        qwen3,
        *("--tensor-parallel-size", "2", "--max-model-len", "2048"),
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    pages = Pages(pool, qwen3)
    question = questions["two ranks"]
    assert server.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
    pages.wait_for(question.prompt)
    with EmbeddedStore(pool) as store:
        heads = sorted((info.shard.head_start, info.shard.head_stop) for info in store.namespaces())
    assert heads == [(0, 2), (2, 4)]

    server.reset_prefix_cache()
    again = server.ask(question.prompt, max_tokens=len(question.answer))
    assert again.token_ids == question.answer
    assert again.cached_tokens == question.num_full_pages * PAGE_TOKENS

    server.reset_prefix_cache()
    pages.falsify(question.prompt, page=3)
    falsified = server.ask(question.prompt, max_tokens=len(question.answer))
    assert falsified.cached_tokens == again.cached_tokens
    assert falsified.token_ids != question.answer
