"""A pool that fails under a running engine: every request is answered by recomputation, and the log says why once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.conftest import QWEN3_ARGS, StartServer
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.pool_faults import damage, lock_held
from e2e.questions import Question
from e2e.said import LOGS_REQUESTS, lines, runs, why
from e2e.server import Server
from store_client import EmbeddedStore
from store_client.testing import SHARD, chain, namespace, put_chain

CAPACITY = "48MiB"
FILE_SYSTEM = "256m"


@pytest.fixture(scope="module")
def pool() -> Iterator[Path]:
    """A pool on a small file system of its own, where that can be mounted, so that it can be filled."""
    folder = Path(tempfile.mkdtemp(prefix="mooncake-connector-test-", dir="/dev/shm"))
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={FILE_SYSTEM},mode=700", "none", folder], check=True)
    try:
        yield folder / "pool"
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "-l", folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def server(questions: dict[str, Question], start: StartServer, qwen3: Path) -> Server:
    return start(qwen3, *QWEN3_ARGS, env={"MOONCAKE_CONNECTOR_CAPACITY": CAPACITY} | LOGS_REQUESTS)


@pytest.fixture(scope="module")
def pages(server: Server, pool: Path) -> Pages:
    return Pages(pool, server.model, lambda: server)


def answers(server: Server, question: Question) -> int:
    """Ask with an empty cache of the engine's own; the answer is right. Returns the tokens that were not computed."""
    server.reset_prefix_cache()
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert answer.token_ids == question.answer
    return answer.cached_tokens


def works_again(server: Server, pages: Pages, question: Question) -> None:
    """What is asked is stored and loaded, sooner or later after a fault has gone."""

    def hit() -> bool:
        return answers(server, question) == question.num_full_pages * PAGE_TOKENS

    wait_for(hit, "a hit after the fault has gone")


def explained(server: Server, pool: Path, question: Question, folder: Path) -> tuple[str | None, list[str]]:
    """Why the pool has not all of it, in one word, and what became of its pages."""
    file = folder / "tokens.json"
    file.write_text(json.dumps(question.prompt))
    told = why(pool, "--url", server.url, "--tokens", str(file))
    return told["reason"], [what for _, _, what in runs(told)]


def missed(server: Server, question: Question) -> str:
    """Ask, and say with what word the request has missed its first page."""
    before = len(lines(server))
    assert answers(server, question) == 0
    wait_for(lambda: len(lines(server)) > before, "the request's line in the log")
    return lines(server)[-1]["miss"]


def test_checksum_errors_on_every_page(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    answers(server, question)
    pages.wait_for(question.prompt)
    damage(pool)
    assert answers(server, question) == 0
    wait_for(
        lambda: server.metric("vllm:mooncake_connector_failures_total", cause="load_page_lost") >= 1,
        "the failed load in the engine's metrics",
    )
    works_again(server, pages, question)
    assert server.log_text().count("does not match its checksum") == 1


def verify(pool: Path) -> None:
    damage(pool)
    with EmbeddedStore(pool, rebuild=False) as store:
        assert store.verify().corrupt


def clear(pool: Path) -> None:
    assert store_command("clear", "--pool", pool, "--yes").startswith("removed ")


def fill(pool: Path) -> None:
    """With pages of another model, more than there is room for."""
    with EmbeddedStore(pool, rebuild=False) as store:
        space = store.space(namespace("another model"), SHARD)
        for number in range(16):
            put_chain(space, chain(f"chain {number}", 64), 64 << 10)


@pytest.mark.parametrize(
    "reason, cause, lose",
    [("damaged", "corrupt", verify), ("cleared", "cleared", clear), ("evicted", "pressure", fill)],
)
def test_why_pages_are_gone_that_were_there(
    reason: str, cause: str, lose: Callable[[Path], None],
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question], tmp_path: Path,
) -> None:  # fmt: skip
    question = questions["number 0"]
    answers(server, question)
    pages.wait_for(question.prompt)
    assert explained(server, pool, question, tmp_path) == (None, ["hit"])
    lose(pool)
    assert explained(server, pool, question, tmp_path) == (reason, [cause])
    assert missed(server, question) == reason
    works_again(server, pages, question)


def test_pool_deleted_under_the_engine(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["number 1"]
    answers(server, question)
    shutil.rmtree(pool)
    wait_for(lambda: answers(server, question) >= 0 and (pool / "pool.json").exists(), "a new pool in its place")
    works_again(server, pages, question)


def store_command(*arguments: object) -> str:
    """What a person runs."""
    command = [sys.executable, "-m", "mooncake_connector.cli.entry", "store", *map(str, arguments)]
    environment = {**os.environ, "MOONCAKE_CONNECTOR_CAPACITY": CAPACITY}
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_snapshot_brings_pages_back_into_a_new_pool(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question], tmp_path: Path
) -> None:
    """The answer is from them: nobody has asked the question since the pool was destroyed."""
    question, other = questions["number 3"], questions["number 4"]
    answers(server, question)
    pages.wait_for(question.prompt)
    assert store_command("snapshot", tmp_path / "saved", "--pool", pool).startswith("saved ")
    store_command("destroy", "--pool", pool, "--yes")
    assert store_command("restore", tmp_path / "saved", "--pool", pool).startswith("restored ")
    works_again(server, pages, other)  # the server uses the new pool
    assert pages.count(question.prompt) == question.num_full_pages
    assert answers(server, question) == question.num_full_pages * PAGE_TOKENS


def test_lock_held_by_a_stopped_process(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    stored, question = questions["number 1"], questions["number 2"]
    works_again(server, pages, stored)
    with lock_held(pool):
        assert answers(server, question) == 0
        assert answers(server, stored) == stored.num_full_pages * PAGE_TOKENS, "reading needs no lock"
        wait_for(
            lambda: server.metric("vllm:mooncake_connector_failures_total", cause="save_pool_refused") >= 1,
            "the refused save in the engine's metrics",
        )
        assert missed(server, question) == "refused", "it could not be stored"
    works_again(server, pages, question)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a full file system needs root (mount)")
def test_full_file_system(server: Server, pages: Pages, pool: Path, questions: dict[str, Question]) -> None:
    ballast = pool.parent / "ballast"
    shutil.rmtree(pool, ignore_errors=True)
    with open(ballast, "wb") as file:
        status = os.statvfs(pool.parent)
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)
    for name in ("number 3", "number 0", "number 2"):
        answers(server, questions[name])
        answers(server, questions[name])
    ballast.unlink()
    time.sleep(1)
    works_again(server, pages, questions["number 3"])
