"""A pool that fails under a running engine: every request is answered by recomputation, and the log says why once."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from e2e.conftest import QWEN3_ARGS, StartServer
from e2e.pages import PAGE_TOKENS, Pages, clear, wait_for
from e2e.pool_faults import damage, lock_held
from e2e.questions import Question
from e2e.said import LOGS_REQUESTS, explained_in_words, line, runs, told, why, why_in_words
from e2e.server import Server
from e2e.threads import stopped, thread_that_wakes
from store_client import EmbeddedStore
from store_client.testing import SHARD, chain, namespace, put_chain

CAPACITY_NBYTES = 48 << 20
CAPACITY = str(CAPACITY_NBYTES)
FILE_SYSTEM = "256m"
MIN_HIT_TOKENS = 2 * PAGE_TOKENS
PAGE_NBYTES = 16384 * PAGE_TOKENS  # of KV, all layers, in float32


needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a full file system needs root (mount)")


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
    settings = {"MOONCAKE_CONNECTOR_CAPACITY": CAPACITY, "MOONCAKE_CONNECTOR_MIN_HIT_TOKENS": str(MIN_HIT_TOKENS)}
    return start(qwen3, *QWEN3_ARGS, env=settings | LOGS_REQUESTS)


@pytest.fixture(scope="module")
def pages(server: Server, pool: Path) -> Pages:
    return Pages(pool, server.model, lambda: server)


def answers(server: Server, question: Question) -> int:
    """Ask with an empty cache of the engine's own; the answer is right. Returns the tokens that were not computed."""
    server.reset_prefix_cache()
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert answer.token_ids == question.answer
    return answer.cached_tokens


def works_again(server: Server, pages: Pages, question: Question, *, every_s: float = 0.02) -> None:
    """What is asked is stored and loaded, sooner or later after a fault has gone.

    `every_s`: seconds between two requests, where it goes on for a while. Each takes from what the others are of all
    that was asked, and the doctor is silent about small parts.
    """

    def hit() -> bool:
        return answers(server, question) == question.num_full_pages * PAGE_TOKENS

    wait_for(hit, "a hit after the fault has gone", every_s=every_s)


Tokens = Callable[[Sequence[int]], tuple[str, str]]


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    """Arguments of `why` for the tokens of a prompt."""

    def written(prompt: Sequence[int]) -> tuple[str, str]:
        (tmp_path / "tokens.json").write_text(json.dumps(prompt))
        return "--tokens", str(tmp_path / "tokens.json")

    return written


def explained(server: Server, pool: Path, tokens: tuple[str, str]) -> tuple[str | None, list[str]]:
    """Why the pool has not all of a prompt, in one word, and what became of its pages."""
    found = why(pool, "--url", server.url, *tokens)
    return found["reason"], [what for _, _, what in runs(found)]


def missed(server: Server, question: Question) -> dict[str, str]:
    """The line of a request that hits nothing."""

    def ask() -> None:
        assert answers(server, question) == 0

    return line(server, ask)


def fill_file_system(folder: Path, *, but_for_nbytes: int = 0) -> Path:
    """The file that takes all the room there was."""
    with open(folder / "ballast", "wb") as file:
        status = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - but_for_nbytes)
    return folder / "ballast"


@needs_mount
def test_pages_that_find_no_space_on_the_file_system(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question], tokens: Tokens
) -> None:
    """The first one here: nothing was stored, and a pool with pages evicts some instead."""
    server.ask(range(PAGE_TOKENS // 2), max_tokens=1)
    wait_for(lambda: any(pool.glob("*/requests")), "a place for what is said of requests")
    ballast = fill_file_system(pool.parent, but_for_nbytes=PAGE_NBYTES // 2)
    try:
        question = questions["number 4"]
        answers(server, question)
        asked = tokens(question.prompt)
        wait_for(lambda: explained(server, pool, asked) == ("refused", ["no_space"]), "pages that were refused")
        said = missed(server, question)
        assert said["miss"] == "refused"
        explained_in_words(server, pool, said)
        words = why_in_words(pool, "--url", server.url, *asked)
        assert re.search(r" not stored at \d\d:\d\d \(.* ago\): pool unavailable, the file system is full\n", words)
    finally:
        ballast.unlink()
    works_again(server, pages, question, every_s=1.0)


def test_checksum_errors_on_every_page(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    answers(server, question)
    pages.wait_for(question.prompt)
    damage(pool)
    said = missed(server, question)
    assert (said["miss"], said["hit_tokens"]) == ("load_failed", "0")
    explained_in_words(server, pool, said)
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
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question], tokens: Tokens,
) -> None:  # fmt: skip
    question = questions["number 0"]
    answers(server, question)
    pages.wait_for(question.prompt)
    asked = tokens(question.prompt)
    assert explained(server, pool, asked) == (None, ["hit"])
    lose(pool)
    assert explained(server, pool, asked) == (reason, [cause])
    said = missed(server, question)
    assert said["miss"] == reason
    explained_in_words(server, pool, said)
    works_again(server, pages, question)


def test_after_evictions_the_doctor_says_how_large_the_pool_would_have_to_be(server: Server, pool: Path) -> None:
    """The test before has provoked them."""
    found = told(server, pool)
    (detail,) = [detail for _, detail in found["missed"] if "evicted" in detail]
    larger = re.search(
        r"; they went \d.* after their last use, and were asked for \d.* after it, so the pool would have to be about "
        r"(\d+) times as large: give the pool a larger capacity",
        detail,
    )
    assert larger is not None and int(larger[1]) >= 2, detail
    ((_, detail),) = found["pool"]
    assert re.search(r"; [\d,]+ pages were evicted, \d.* after their last use on average", detail), detail


def test_a_hit_below_min_hit_tokens(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question], tokens: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The pool has one page of a prompt; of the next one it has as many as are worth a load."""
    stored = questions["number 0"].prompt
    answers(server, questions["number 0"])
    pages.wait_for(stored)

    numbers = itertools.count()

    def forked(shared: int) -> dict[str, str]:
        """Another prompt each time."""
        server.reset_prefix_cache()
        prompt = (*stored[:shared], next(numbers) % 256, *reversed(stored[:200]))
        return line(server, lambda: server.ask(prompt, max_tokens=1))

    said = forked(PAGE_TOKENS)
    assert (said["miss"], said["hit_tokens"]) == ("below_min_hit", "0")
    explained_in_words(server, pool, said, again=lambda: forked(PAGE_TOKENS))
    said = forked(MIN_HIT_TOKENS)
    assert (said["miss"], said["hit_tokens"]) == ("never_stored", str(MIN_HIT_TOKENS))

    asked = tokens((*stored[:PAGE_TOKENS], *reversed(stored[:150])))
    assert explained(server, pool, asked) == ("never_stored", ["hit", "unknown"])
    monkeypatch.setenv("MOONCAKE_CONNECTOR_MIN_HIT_TOKENS", str(MIN_HIT_TOKENS))
    assert explained(server, pool, asked) == ("below_min_hit", ["hit", "unknown"])
    words = f"below min_hit_tokens: {PAGE_TOKENS} tokens hit, {MIN_HIT_TOKENS} are wanted"
    assert words in why_in_words(pool, "--url", server.url, *asked)


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

    def refused() -> float:
        return server.metric("vllm:mooncake_connector_failures_total", cause="save_pool_refused")

    before = refused()
    with lock_held(pool):
        assert answers(server, question) == 0
        assert answers(server, stored) == stored.num_full_pages * PAGE_TOKENS, "reading needs no lock"
        wait_for(lambda: refused() > before, "the refused save in the engine's metrics")
        said = missed(server, question)
        assert said["miss"] == "refused", "it could not be stored"
    explained_in_words(server, pool, said)
    works_again(server, pages, question)


@needs_mount
def test_full_file_system(server: Server, pages: Pages, pool: Path, questions: dict[str, Question]) -> None:
    shutil.rmtree(pool, ignore_errors=True)
    ballast = fill_file_system(pool.parent)
    for name in ("number 3", "number 0", "number 2"):
        answers(server, questions[name])
        answers(server, questions[name])
    ballast.unlink()
    time.sleep(1)
    works_again(server, pages, questions["number 3"])


def test_a_load_that_hangs_fails_and_then_the_pool_is_left_alone_for_a_while(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    """The last one here, since nothing is loaded for half a minute."""
    question = questions["number 1"]
    works_again(server, pages, question)

    def ask(prompt: Sequence[int]) -> None:
        server.reset_prefix_cache()
        server.ask(prompt, max_tokens=1)

    mover = thread_that_wakes(server, lambda: ask(question.prompt), lambda: ask(question.prompt[: PAGE_TOKENS // 2]))
    said: list[dict[str, str]] = []

    def is_left_alone() -> bool:
        said.append(missed(server, question))
        return said[-1]["miss"] == "stalled"

    with stopped(mover):
        wait_for(is_left_alone, "a request for which the pool is left alone")
        for name in questions:
            if name.startswith("number"):  # a part of the prompts that the doctor tells of
                answers(server, questions[name])
    *failed, last = said
    assert {each["miss"] for each in failed} == {"load_failed"}
    assert server.metric("vllm:mooncake_connector_failures_total", cause="load_deadline") >= len(failed)
    explained_in_words(server, pool, last)
    works_again(server, pages, question, every_s=1.0)
