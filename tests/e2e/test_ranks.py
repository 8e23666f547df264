"""Tensor-parallel ranks save and load their own halves of pages, and put pages together from those of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.conftest import StartServer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question
from e2e.server import Server
from store_client import EmbeddedStore


class Instances:
    """Servers of different TP sizes, one after the other on one pool."""

    def __init__(self, start: StartServer, model: Path, pool: Path, questions: dict[str, Question]) -> None:
        self._start, self._model, self._questions = start, model, questions
        self._running: Server | None = None
        self.pages = Pages(pool, model)

    def run(self, tp_size: int) -> Server:
        """Stop the server that runs, and start one of so many ranks."""
        if self._running is not None:
            self._running.stop()
        env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if tp_size == 2 else {}
        args = ("--tensor-parallel-size", str(tp_size), "--max-model-len", "2048")
        self._running = self._start(self._model, *args, env=env)
        return self._running

    def computes(self, name: str) -> None:
        """The question's pages are not in the pool, and are afterwards."""
        assert self._ask(name) == 0
        self.pages.wait_for(self._questions[name].prompt)

    def loads(self, name: str) -> None:
        assert self._ask(name) == self._questions[name].num_full_pages * PAGE_TOKENS

    def _ask(self, name: str) -> int:
        """Check the answer, and return how many prompt tokens were not computed."""
        assert self._running is not None
        question = self._questions[name]
        answer = self._running.ask(question.prompt, max_tokens=len(question.answer))
        assert answer.token_ids == question.answer
        return answer.cached_tokens


@pytest.fixture(scope="module")
def instances(questions: dict[str, Question], start: StartServer, qwen3: Path, pool: Path) -> Instances:
    return Instances(start, qwen3, pool, questions)


def test_two_ranks_reuse_their_halves_of_the_pages(
    questions: dict[str, Question], instances: Instances, pool: Path
) -> None:
    server = instances.run(2)
    instances.computes("two ranks")
    with EmbeddedStore(pool) as store:
        heads = sorted((info.shard.head_start, info.shard.head_stop) for info in store.namespaces())
    assert heads == [(0, 2), (2, 4)]

    server.reset_prefix_cache()
    instances.loads("two ranks")
    falsify_and_see(server, instances.pages, questions["two ranks"])


def falsify_and_see(server: Server, pages: Pages, question: Question) -> None:
    """The answer came from the pool: with other bytes there it is another one."""
    server.reset_prefix_cache()
    pages.falsify(question.prompt, page=3)
    falsified = server.ask(question.prompt, max_tokens=len(question.answer))
    assert falsified.cached_tokens == question.num_full_pages * PAGE_TOKENS
    assert falsified.token_ids != question.answer


def test_instances_of_one_and_two_ranks_read_each_others_pages(
    questions: dict[str, Question], instances: Instances
) -> None:
    instances.run(2)
    instances.computes("computed by two")
    server = instances.run(1)
    instances.loads("computed by two")
    instances.computes("computed by one")
    falsify_and_see(server, instances.pages, questions["computed by two"])
    server = instances.run(2)
    instances.loads("computed by one")
    falsify_and_see(server, instances.pages, questions["computed by one"])
