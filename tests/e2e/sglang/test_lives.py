"""Life after life on one pool, each with another host layout and another way in: each reads what all before it wrote.

Reading what a former life wrote is what a restart is; reading it in another layout shows that the pages in the pool
have none. The second life is of two ranks, so that its pages are halves, and it and the last one read across that too.
The fourth layout, layer_first, is in `tests/sglang/test_layouts.py`, with SGLang's own host pools.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.index import Endpoints, Indexed
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.questions import Question, draw_tokens
from e2e.said import lines, runs, told, top, why
from e2e.sglang.conftest import StartSGLang
from e2e.sglang_server import SGLangServer, Way
from mooncake_connector.deploy.watch import read
from store_client import EmbeddedStore


@dataclass(frozen=True, slots=True)
class Life:
    """How one life of the server is started. What SGLang holds on the device is little where it has to evict."""

    way: Way
    layout: str
    io_backend: str = "kernel"
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    max_total_tokens: int = 8192
    ranks: int = 1


LIVES = (
    Life("name", "page_first"),
    Life("takeover", "page_head", prefetch_policy="best_effort", ranks=2),
    Life(
        *("dynamic", "page_first_direct", "direct"),
        write_policy="write_back",
        prefetch_policy="timeout",
        max_total_tokens=2048,
    ),
)


class Lives:
    """The server in one of its lives at a time, and what is in the pool."""

    def __init__(self, start: StartSGLang, questions: dict[str, Question], pool: Path, model: Path) -> None:
        self._start, self._questions, self.pages = start, questions, Pages(pool, model, self._running)
        self.endpoints = Endpoints()
        self._now: tuple[Life, SGLangServer] | None = None

    def __getitem__(self, number: int) -> SGLangServer:
        """The server in this life, which begins now unless it has already."""
        life = LIVES[number]
        if self._now is None or self._now[0] != life:
            if self._now is not None:
                self._now[1].stop()
            self._now = (life, self._begin(life))
        return self._now[1]

    def _running(self) -> SGLangServer:
        assert self._now is not None
        return self._now[1]

    def _begin(self, life: Life) -> SGLangServer:
        args = ["--kv-events-config", self.endpoints.config()]
        env = {}
        if life.ranks == 2:
            args += ["--tp", "2"]
            env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        return self._start(
            way=life.way,
            layout=life.layout,
            io_backend=life.io_backend,
            write_policy=life.write_policy,
            prefetch_policy=life.prefetch_policy,
            max_total_tokens=life.max_total_tokens,
            # A busy machine shall not decide what `timeout` reads.
            extra_config={"prefetch_timeout_base": 30, "log_requests": True},
            args=args,
            env=env,
        )

    def question_of(self, number: int) -> Question:
        return self._questions[f"number {number}"]

    def written_by(self, number: int) -> Question:
        """The question that this life has computed; it does so now if it has not yet."""
        question = self.question_of(number)
        if self.pages.count(question.prompt) < question.num_full_pages:
            ask(self[number], question, hit_tokens=0)
            if LIVES[number].write_policy == "write_back":
                assert self.pages.count(question.prompt) == 0
                evicted, *_, still_there = fill_the_device(self[number], LIVES[number].max_total_tokens)
                self.pages.wait_for(evicted)
                assert self.pages.count(still_there) == 0
            self.pages.wait_for(question.prompt)
        return question


def fill_the_device(server: SGLangServer, tokens: int) -> list[tuple[int, ...]]:
    """Make SGLang evict what it has on the device, and the first of the prompts that this takes; returns these."""
    source = random.Random(4)
    prompts = [draw_tokens(source, 512) for _ in range(tokens // 512 + 1)]
    for prompt in prompts:
        server.ask(prompt, max_tokens=1)
    return prompts


def ask(server: SGLangServer, question: Question, *, hit_tokens: int | None = None, **fields: object) -> int:
    """The answer is plain SGLang's. Returns the tokens that came from the pool, which are `hit_tokens` if given."""
    answer = server.ask(question.prompt, max_tokens=len(question.answer), **fields)  # type: ignore[arg-type]
    assert answer.token_ids == question.answer
    if hit_tokens is not None:
        assert answer.from_storage == hit_tokens
    return answer.from_storage


def full(question: Question) -> int:
    return question.num_full_pages * PAGE_TOKENS


@pytest.fixture(scope="module")
def lives(start: StartSGLang, questions: dict[str, Question], pool: Path, qwen3: Path) -> Lives:
    return Lives(start, questions, pool, qwen3)


# What one server is enough for: that of the first life.


def test_hit_after_both_levels_of_the_engine_were_flushed(lives: Lives) -> None:
    question = lives.written_by(0)
    lives[0].flush()
    ask(lives[0], question, hit_tokens=full(question))


def test_pages_that_were_moved_are_in_sglangs_metrics(lives: Lives) -> None:
    question = lives.written_by(0)
    before = lives[0].metric("mooncake_connector_pages_total", operation="load")
    lives[0].flush()
    ask(lives[0], question, hit_tokens=full(question))
    assert lives[0].metric("mooncake_connector_pages_total", operation="load") == before + question.num_full_pages
    wait_for(lambda: lives[0].metric("sglang:prefetch_pgs_count") > 0, "what the backend reports, in SGLang's figures")


def test_why_names_the_pages_that_a_server_stored(lives: Lives, pool: Path, tmp_path: Path) -> None:
    question, server = lives.written_by(0), lives[0]
    (tmp_path / "ids").write_text(json.dumps(question.prompt))
    found = why(pool, "--url", server.url, "--tokens", str(tmp_path / "ids"))
    assert runs(found) == [(0, question.num_full_pages - 1, "hit")]
    assert found["engine_settings"] == [], "the server says its dtype and the size of its pages"
    assert why(pool, "--url", server.url, "short")["reason"] == "short"


def test_the_doctor_and_the_log_say_what_became_of_a_prompt(lives: Lives, pool: Path) -> None:
    question, server = lives.written_by(0), lives[0]
    server.flush()
    ask(server, question, hit_tokens=full(question), rid="what-became-of-it")

    def is_said() -> bool:
        return any(line["id"] == "what-became-of-it" for line in lines(server))

    wait_for(is_said, "the request's line in the log")
    (line,) = (line for line in lines(server) if line["id"] == "what-became-of-it")
    assert line["hit_tokens"] == str(full(question))
    wait_for(lambda: why(pool, "--request", "what-became-of-it") is not None, "what the server leaves", every_s=0.5)
    (record,) = why(pool, "--request", "what-became-of-it")
    assert [run[:3] for run in record["runs"]] == [[0, question.num_full_pages - 1, "stored"]]
    assert (record["hit_tokens"], record["miss"], record["missed"]) == (full(question), None, {})
    names = ("queried", "hit", "miss")
    queried, hit, miss = (server.metric(f"mooncake_connector_{name}_tokens_total") for name in names)
    assert queried == hit + miss and hit >= full(question)
    checks = told(server, pool)
    assert checks["server"][0][0] == checks["connector"][0][0] == checks["pool"][0][0] == "ok"
    assert f"{hit:,.0f} of {queried:,.0f} prompt tokens" in checks["hit rate"][0][1]


def test_top_shows_what_the_server_does(lives: Lives, pool: Path) -> None:
    """By the names that this SGLang has for its figures."""
    question, server = lives.written_by(0), lives[0]

    def hits() -> None:
        server.flush()
        ask(server, question, hit_tokens=full(question))

    shown = top(server, pool, hits, "hit_share", "pool_tokens_s", "load_nbytes_s", "saved_s_s")
    assert {(each["kind"], each["cause"]) for each in shown} == {("SGLang", "")}
    page = read(f"{server.url}/metrics") or ""
    assert "\nsglang:num_running_reqs{" in page and "\nsglang:num_queue_reqs{" in page


def test_a_page_with_wrong_bytes_and_a_right_checksum_changes_the_text(
    lives: Lives, questions: dict[str, Question]
) -> None:
    """The negative control of this whole folder: what is loaded from the pool decides the answer."""
    question = questions["falsified"]
    ask(lives[0], question, hit_tokens=0)
    lives.pages.wait_for(question.prompt)
    lives.pages.falsify(question.prompt, page=question.num_full_pages // 2)
    lives[0].flush()
    falsified = lives[0].ask(question.prompt, max_tokens=len(question.answer))
    assert falsified.from_storage == full(question)
    assert falsified.token_ids != question.answer


def test_prompts_that_fork_share_the_full_pages_before_the_fork(lives: Lives, questions: dict[str, Question]) -> None:
    ask(lives[0], questions["fork"], hit_tokens=0)
    lives.pages.wait_for(questions["fork"].prompt)
    lives[0].flush()
    ask(lives[0], questions["fork/other end"], hit_tokens=400 // PAGE_TOKENS * PAGE_TOKENS)


def test_prompt_of_exactly_full_pages_leaves_the_last_one_to_the_engine(
    lives: Lives, questions: dict[str, Question]
) -> None:
    """SGLang always computes the last token, and its pages are whole or not there."""
    question = questions["exact"]
    assert len(question.prompt) == full(question)
    ask(lives[0], question, hit_tokens=0)
    lives.pages.wait_for(question.prompt)
    lives[0].flush()
    ask(lives[0], question, hit_tokens=full(question) - PAGE_TOKENS)


def test_prompt_shorter_than_a_page_leaves_the_pool_alone(
    lives: Lives, pool: Path, questions: dict[str, Question]
) -> None:
    server = lives[0]
    lives.written_by(0)
    with EmbeddedStore(pool) as store:
        before = store.stats().pages
        for _ in range(2):
            ask(server, questions["short"], hit_tokens=0)
            server.flush()
        assert store.stats().pages == before


def test_tenants_share_pages_under_the_same_key_and_salt_only(lives: Lives, questions: dict[str, Question]) -> None:
    server, question = lives[0], questions["tenants"]
    tenants: Sequence[dict[str, str]] = ({"extra_key": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {})
    for hit_tokens in (0, full(question)):
        for tenant in tenants:
            server.flush()
            ask(server, question, hit_tokens=hit_tokens, **tenant)
            lives.pages.wait_for(question.prompt, **tenant)


def test_a_crowd_with_shared_prefixes(lives: Lives, questions: dict[str, Question]) -> None:
    server = lives[0]
    asked = [questions[name] for name in ("exact", "fork", "fork/other end", "short", "tenants")]
    for question in asked:
        ask(server, question)
        lives.pages.wait_for(question.prompt)
    server.flush()
    crowd = asked * 6
    with ThreadPoolExecutor(len(crowd)) as threads:
        hits = list(threads.map(lambda question: ask(server, question), crowd))
    assert sum(hits) > 0


def test_aborted_requests_leave_no_wrong_page_and_hold_nothing(lives: Lives, pool: Path) -> None:
    server, question = lives[0], lives.written_by(0)
    source = random.Random(8)
    before = server.metric("sglang:num_aborted_requests_total")
    for slower in (1, 3, 9, 27):  # some come too early or too late, and on a busy machine more of them
        for step in range(12):
            server.flush()  # fails while a request runs
            server.abandon(draw_tokens(source, 1500), after_s=step * 0.04 * slower)  # saves
            server.abandon(question.prompt, after_s=step * 0.01 * slower)  # loads
        server.flush()
        aborted = server.metric("sglang:num_aborted_requests_total") - before
        if aborted >= 12:
            break
    assert aborted >= 12
    ask(server, question, hit_tokens=full(question))
    with EmbeddedStore(pool) as store:
        report = store.verify()
        assert report.pages > 0
        assert report.corrupt == 0


# Life after life.


def test_what_an_index_knew_of_a_life_ends_with_it(lives: Lives) -> None:
    question = lives.written_by(0)
    with closing(Indexed(lives.endpoints, engine="SGLang")) as indexed:

        def knows(tokens: int) -> None:
            wait_for(lambda: indexed.of(question.prompt, "GPU") == tokens, f"{tokens} tokens in the index")

        lives[0].flush()
        ask(lives[0], question)
        knows(full(question))
        other = lives[1]
        other.flush()
        knows(0)
        ask(other, question)
        knows(full(question))


def test_best_effort_policy_takes_whole_pages_or_none(lives: Lives) -> None:
    question = lives.written_by(0)
    for _ in range(4):
        lives[1].flush()
        assert ask(lives[1], question) in range(0, full(question) + 1, PAGE_TOKENS)


def test_two_ranks_read_what_one_wrote_once_told_to_wait(lives: Lives) -> None:
    lives.written_by(0)
    status, text = lives[1].admin(
        "PUT", body={"hicache_storage_backend": "mooncake", "hicache_storage_prefetch_policy": "wait_complete"}
    )
    assert status == 200, text
    lives[1].flush()
    reads_all_before(lives, 1)


def test_two_ranks_store_their_halves(lives: Lives, pool: Path) -> None:
    question = lives.written_by(1)
    with EmbeddedStore(pool) as store:
        heads = {(info.shard.head_start, info.shard.head_stop) for info in store.namespaces()}
    assert {(0, 2), (2, 4)} <= heads
    lives[1].flush()
    ask(lives[1], question, hit_tokens=full(question))


def test_a_page_of_which_one_rank_lacks_its_half_is_missed_for_what_became_of_that(lives: Lives) -> None:
    """The rank that counts has its own half."""
    question, server = lives.written_by(1), lives[1]
    lives.pages.remove(question.prompt, 1, first_head=2)
    server.flush()
    reasons = ("cleared", "ranks_disagree", "never_stored")
    before = [server.metric("mooncake_connector_miss_tokens_total", reason=reason) for reason in reasons]
    ask(server, question, hit_tokens=PAGE_TOKENS, rid="half-a-page")
    wait_for(lambda: any(line["id"] == "half-a-page" for line in lines(server)), "the request's line in the log")
    (line,) = (line for line in lines(server) if line["id"] == "half-a-page")
    assert (line["hit_tokens"], line["miss"]) == (str(PAGE_TOKENS), "cleared")
    after = [server.metric("mooncake_connector_miss_tokens_total", reason=reason) for reason in reasons]
    assert [now - former for now, former in zip(after, before, strict=True)] == [full(question) - PAGE_TOKENS, 0, 0]
    lives.pages.wait_for(question.prompt)


def test_one_rank_reads_what_two_wrote_and_all_before_with_the_policy_timeout(lives: Lives) -> None:
    reads_all_before(lives, 2)


def test_write_back_policy_writes_what_the_engine_evicts(lives: Lives) -> None:
    question = lives.written_by(2)
    lives[2].flush()
    ask(lives[2], question, hit_tokens=full(question))


def reads_all_before(lives: Lives, number: int) -> None:
    written = [lives.written_by(former) for former in range(number)]
    for question in written:
        ask(lives[number], question, hit_tokens=full(question))
