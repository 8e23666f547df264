"""Fixtures for tests of SGLang alone: questions with plain SGLang's answers, and servers on a module's pool."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.index import Endpoints
from e2e.pages import PAGE_TOKENS
from e2e.process import assert_no_complaints, pool_folder, running
from e2e.questions import Examiner, Question
from e2e.sglang_server import ONE_CORE, SGLangServer

# Modules have pools of their own, so they ask the same questions.
QUESTIONS = {
    **{f"number {number}": 450 for number in range(4)},
    "falsified": 450,
    "fork": 500,
    "exact": 384,
    "short": 40,
    "tenants": 300,
}
FORKS = {"fork/other end": (400, 500)}  # (tokens in common, tokens in all)

MAX_TOKENS = 4
NAME = "mooncake_connector"


@pytest.fixture(scope="session")
def questions(qwen3: Path, logs: Path) -> dict[str, Question]:
    """Every question for the Qwen3 checkpoint by its name, answered by SGLang without any cache."""
    plain = SGLangServer(qwen3, log=logs / "sglang-plain.log", way="plain", env=ONE_CORE)
    with running(plain):
        examiner = Examiner(plain, max_tokens=MAX_TOKENS)
        asked = {name: examiner.question(name, length) for name, length in QUESTIONS.items()}
        for name, (shared, length) in FORKS.items():
            asked[name] = examiner.question(name, length, prefix=asked[name.partition("/")[0]].prompt[:shared])
        return asked


@dataclass(frozen=True, slots=True)
class Attachable:
    """A server whose storage is attached while it runs, the pool for that, and where it publishes its events."""

    server: SGLangServer
    pool: Path
    endpoints: Endpoints

    def attach(
        self, *, policy: str = "wait_complete", write_policy: str = "write_through", **config: object
    ) -> tuple[int, str]:
        config = {"prefetch_threshold": PAGE_TOKENS, **config}
        return self.server.admin(
            "PUT",
            body={
                "hicache_storage_backend": NAME,
                "hicache_storage_backend_extra_config_json": json.dumps(config),
                "hicache_storage_prefetch_policy": policy,
                "hicache_write_policy": write_policy,
            },
        )

    def status(self) -> tuple[str | None, str]:
        """(backend, policy) as the server tells them."""
        code, text = self.server.admin("GET")
        assert code == 200, text
        told = json.loads(text)
        return told["hicache_storage_backend"], told["hicache_storage_prefetch_policy"]

    def be_attached(self) -> None:
        if self.status()[0] is None:
            code, text = self.attach()
            assert code == 200, text

    def hit_tokens(self, question: Question) -> int:
        return hit_tokens(self.server, question)


def hit_tokens(server: SGLangServer, question: Question) -> int:
    """Ask with empty levels of the engine's own; the answer is right. Returns the tokens that came from the pool."""
    server.flush()
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert answer.token_ids == question.answer
    return answer.from_storage


def full(question: Question) -> int:
    return question.num_full_pages * PAGE_TOKENS


@pytest.fixture(scope="session")
def attachable(
    questions: dict[str, Question], qwen3: Path, logs: Path, stops: dict[str, Callable[[], None]]
) -> Attachable:
    """HiCache with two levels, and zero-copy; it depends on the questions, so that their server is gone before."""
    stack = ExitStack()
    pool = stack.enter_context(pool_folder())
    settings = {"way": "no storage", "layout": "page_first_direct", "io_backend": "direct", "env": ONE_CORE}
    endpoints = Endpoints()
    settings["args"] = ("--kv-events-config", endpoints.config())
    server = SGLangServer(qwen3, log=logs / "sglang-attachable.log", pool=pool, **settings)  # type: ignore[arg-type]

    def stop() -> None:
        stack.close()
        assert_no_complaints([server])

    stops["attachable"] = stop
    stack.enter_context(running(server))
    return Attachable(server, pool, endpoints)


StartSGLang = Callable[..., SGLangServer]


@pytest.fixture(scope="module")
def start(pool: Path, logs: Path, qwen3: Path, request: pytest.FixtureRequest) -> Iterator[StartSGLang]:
    """`start(env=None, **options)`: a running server of the Qwen3 checkpoint on the module's pool.

    At the end of the module every server that still runs is stopped, and none may have logged an exception.
    """
    servers: list[SGLangServer] = []
    with ExitStack() as stack:

        def start(*, env: Mapping[str, str] | None = None, **options: object) -> SGLangServer:
            log = logs / f"sglang-{request.module.__name__.rpartition('.')[2]}-{len(servers)}.log"
            env = {**ONE_CORE, **(env or {})}
            server = SGLangServer(qwen3, log=log, pool=pool, env=env, **options)  # type: ignore[arg-type]
            servers.append(server)
            return stack.enter_context(running(server))

        yield start
    assert_no_complaints(servers)
