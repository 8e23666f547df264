"""Fixtures for tests of SGLang alone: questions with plain SGLang's answers, and servers on a module's pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.process import running
from e2e.questions import Examiner, Question
from e2e.sglang_server import SGLangServer

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


@pytest.fixture(scope="session")
def questions(qwen3: Path, logs: Path) -> dict[str, Question]:
    """Every question for the Qwen3 checkpoint by its name, answered by SGLang without any cache."""
    plain = SGLangServer(qwen3, log=logs / "sglang-plain.log", way="plain")
    with running(plain):
        examiner = Examiner(plain, max_tokens=MAX_TOKENS)
        asked = {name: examiner.question(name, length) for name, length in QUESTIONS.items()}
        for name, (shared, length) in FORKS.items():
            asked[name] = examiner.question(name, length, prefix=asked[name.partition("/")[0]].prompt[:shared])
        return asked


StartSGLang = Callable[..., SGLangServer]


@pytest.fixture(scope="module")
def start(pool: Path, logs: Path, qwen3: Path, request: pytest.FixtureRequest) -> Iterator[StartSGLang]:
    """`start(**options)`: a running server of the Qwen3 checkpoint on the module's pool.

    At the end of the module every server that still runs is stopped, and none may have logged an exception.
    """
    servers: list[SGLangServer] = []
    with ExitStack() as stack:

        def start(**options: object) -> SGLangServer:
            name = f"{request.module.__name__.rpartition('.')[2]}-{len(servers)}.log"
            server = SGLangServer(qwen3, log=logs / f"sglang-{name}", pool=pool, **options)  # type: ignore[arg-type]
            servers.append(server)
            return stack.enter_context(running(server))

        yield start
    complaints = [complaint for server in servers for complaint in server.complaints()]
    assert not complaints, "the servers logged exceptions:\n" + "\n".join(complaints[:20])
