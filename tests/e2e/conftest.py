"""Fixtures for tests on real servers: checkpoints, questions with the plain engine's answers, pools, servers.

A server takes half a minute to start, so the answers of the plain engine are all asked for in one life of one server,
a module's tests share their servers, and modules that need no settings of their own share one. Such modules follow each
other, and what is shared is stopped after the last test that asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.process import assert_no_complaints, pool_folder, running
from e2e.questions import Examiner, Question
from e2e.said import LOGS_REQUESTS
from e2e.server import ONE_CORE, Server
from models import checkpoint

QWEN3_ARGS = ("--max-model-len", "8192")

# Name and length of the questions for the Qwen3 checkpoint; those after a "/" begin with a part of the one before it.
# Modules with a pool or a cache salt of their own ask the same numbers.
QWEN3_QUESTIONS = {
    "reset": 450,
    "falsified": 450,
    "fork": 500,
    "exact": 384,
    "short": 40,
    "salt": 300,
    "aborts": 300,
    **{f"number {number}": 382 for number in range(5)},
    **{f"crowd {number}": 250 for number in range(4)},
}
QWEN3_FORKS = {
    "fork/other end": (400, 500),  # (tokens in common, tokens in all)
    **{f"crowd {number}/{end}": (200, 250) for number in range(4) for end in range(3)},
}

SHARED = ("attachable", "shared")
LAST = ("test_resets", "test_weight_updates")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that share a server follow each other; last those that change its weights."""
    sharing = {item.path: name for item in items for name in SHARED if name in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (sharing.get(item.path, ""), item.path in sharing and item.path.stem in LAST))


@pytest.fixture(scope="session")
def stops() -> Iterator[dict[str, Callable[[], None]]]:
    """What stops the servers behind a fixture, by its name; called after the last test that asks for the fixture."""
    stops: dict[str, Callable[[], None]] = {}
    with ExitStack() as stack:
        stack.callback(lambda: [stop() for stop in stops.values()])  # of a run that ended early
        yield stops


@pytest.fixture(autouse=True)
def stop_what_is_needed_no_more(request: pytest.FixtureRequest, stops: dict[str, Callable[[], None]]) -> Iterator[None]:
    yield
    items = request.session.items
    needed = {name for item in items[items.index(request.node) + 1 :] for name in getattr(item, "fixturenames", ())}
    for name in stops.keys() - needed:
        stops.pop(name)()


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
    plain = Server(qwen3, log=logs / "plain.log", args=QWEN3_ARGS, env=ONE_CORE)
    with running(plain):
        examiner = Examiner(plain)
        asked = {name: examiner.question(name, length) for name, length in QWEN3_QUESTIONS.items()}
        for name, (shared, length) in QWEN3_FORKS.items():
            trunk = asked[name.partition("/")[0]].prompt
            asked[name] = examiner.question(name, length, prefix=trunk[:shared])
        return asked


@dataclass(frozen=True, slots=True)
class Shared:
    """A server of the Qwen3 checkpoint that several modules use, and its pool, which keeps what is in it."""

    server: Server
    pool: Path


@pytest.fixture(scope="session")
def shared(
    questions: dict[str, Question], qwen3: Path, logs: Path, stops: dict[str, Callable[[], None]]
) -> Shared:
    """Depends on the questions, so that their server is gone before this one starts."""
    stack = ExitStack()
    pool = stack.enter_context(pool_folder())
    args = (*QWEN3_ARGS, "--enable-log-requests")
    server = Server(qwen3, log=logs / "shared.log", pool=pool, args=args, env=ONE_CORE | LOGS_REQUESTS)

    def stop() -> None:
        stack.close()
        assert_no_complaints([server])

    stops["shared"] = stop
    stack.enter_context(running(server))
    return Shared(server, pool)


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    """Path of a pool that the servers of one module share."""
    with pool_folder() as path:
        yield path


StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def start(pool: Path, logs: Path, request: pytest.FixtureRequest) -> Iterator[StartServer]:
    """`start(model, *args, env=None)`: a running server with the connector on the module's pool.

    At the end of the module every server that still runs is stopped, and none may have logged an error.
    """
    servers: list[Server] = []
    with ExitStack() as stack:

        def start(model: Path, *args: str, env: Mapping[str, str] | None = None) -> Server:
            name = f"{request.module.__name__.rpartition('.')[2]}-{len(servers)}.log"
            server = Server(model, log=logs / name, pool=pool, args=args, env={**ONE_CORE, **(env or {})})
            servers.append(server)
            return stack.enter_context(running(server))

        yield start
    assert_no_complaints(servers)
