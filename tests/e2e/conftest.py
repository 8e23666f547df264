"""Fixtures for tests on real servers: checkpoints, questions with the plain engine's answers, pools, servers.

A server takes half a minute to start, so the answers of the plain engine are all asked for in one life of one server,
before any other starts, and a module's tests share their servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.process import pool_folder, running
from e2e.questions import Examiner, Question
from e2e.server import Server
from models import checkpoint

QWEN3_ARGS = ("--max-model-len", "8192")

# Name and length of the questions for the Qwen3 checkpoint; those after a "/" begin with a part of the one before it.
QWEN3_QUESTIONS = {
    "reset": 700,
    "falsified": 500,
    "fork": 640,
    "exact": 384,
    "short": 40,
    "salt": 450,
    "aborts": 400,
    "first to second": 600,
    "second to first": 600,
    "stopped": 700,
    "killed": 500,
    "two models": 500,
    "two ranks": 450,
    **{f"computed by {split}": 450 for split in ("two", "one")},
    **{f"fault {name}": 400 for name in ("corrupt", "deleted", "locked", "full")},
    **{f"pressure {number}": 382 for number in range(5)},
    **{f"crowd {number}": 450 for number in range(4)},
}
QWEN3_FORKS = {
    "fork/other end": (400, 640),  # (tokens in common, tokens in all)
    **{f"crowd {number}/{end}": (400, 450) for number in range(4) for end in range(3)},
}


@pytest.fixture(scope="session")
def qwen3() -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="session")
def logs() -> Path:
    """Where the servers' logs stay after the run, until the next one."""
    folder = Path(__file__).resolve().parents[2] / ".cache" / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def questions(qwen3: Path, logs: Path) -> dict[str, Question]:
    """Every question for the Qwen3 checkpoint by its name, answered by vLLM without the connector or a hit."""
    plain = Server(qwen3, log=logs / "plain.log", args=QWEN3_ARGS)
    with running(plain):
        examiner = Examiner(plain)
        asked = {name: examiner.question(name, length) for name, length in QWEN3_QUESTIONS.items()}
        for name, (shared, length) in QWEN3_FORKS.items():
            trunk = asked[name.partition("/")[0]].prompt
            asked[name] = examiner.question(name, length, prefix=trunk[:shared])
        return asked


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    """Path of a pool that the servers of one module share."""
    with pool_folder() as path:
        yield path


StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def start(pool: Path, logs: Path, request: pytest.FixtureRequest) -> Iterator[StartServer]:
    """`start(model, *args, **options)`: a running server with the connector on the module's pool.

    At the end of the module every server that still runs is stopped, and none may have logged an error.
    """
    servers: list[Server] = []
    with ExitStack() as stack:

        def start(model: Path, *args: str, **options: object) -> Server:
            name = f"{request.module.__name__.rpartition('.')[2]}-{len(servers)}.log"
            server = Server(model, log=logs / name, pool=pool, args=args, **options)  # type: ignore[arg-type]
            servers.append(server)
            return stack.enter_context(running(server))

        yield start
    complaints = [complaint for server in servers for complaint in server.complaints()]
    assert not complaints, "the servers logged errors:\n" + "\n".join(complaints[:20])
