"""One instance: what it computed once it takes from the pool, and the text stays that of the engine without us."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.conftest import Shared
from e2e.pages import PAGE_TOKENS, Pages, wait_for
from e2e.questions import Question, draw_tokens
from e2e.said import lines, told, top
from e2e.server import Server
from mooncake_connector.deploy.watch import read
from store_client import EmbeddedStore


@pytest.fixture(scope="module")
def server(shared: Shared) -> Server:
    return shared.server


@pytest.fixture(scope="module")
def pool(shared: Shared) -> Path:
    return shared.pool


@pytest.fixture(scope="module")
def pages(server: Server, pool: Path) -> Pages:
    return Pages(pool, server.model, lambda: server)


def ask_saved_again(server: Server, pages: Pages, question: Question) -> tuple[int, tuple[int, ...]]:
    """Ask; wait for the pages; empty the engine's own cache; ask again: (tokens not computed, tokens answered)."""
    first = server.ask(question.prompt, max_tokens=len(question.answer))
    assert first.token_ids == question.answer
    pages.wait_for(question.prompt)
    server.reset_prefix_cache()
    again = server.ask(question.prompt, max_tokens=len(question.answer))
    return again.cached_tokens, again.token_ids


def test_hit_after_the_engines_own_cache_was_reset(
    server: Server, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["reset"]
    before = server.tokens_from_connector()
    cached, answer = ask_saved_again(server, pages, question)
    assert answer == question.answer
    assert cached == question.num_full_pages * PAGE_TOKENS
    wait_for(lambda: server.tokens_from_connector() == before + cached, "the server counts the hit as the connector's")


def test_the_doctor_and_the_log_say_what_became_of_a_prompt(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["reset"]
    cached, _ = ask_saved_again(server, pages, question)
    tail = len(question.prompt) - cached
    counts = {"prompt_tokens": str(len(question.prompt)), "hit_tokens": str(cached)}

    def said() -> list[dict[str, str]]:
        """Other tests ask the same server."""
        return [line for line in lines(server) if counts.items() <= line.items()]

    wait_for(lambda: bool(said()), "the request's line in the log")
    line = said()[0]
    assert line["computed_tokens"] == str(tail)
    assert line["miss"] == "short" and float(line["load_ms"]) > 0

    names = ("queried", "hit", "miss")
    queried, hit, miss = (server.metric(f"vllm:mooncake_connector_{name}_tokens_total") for name in names)
    assert queried == hit + miss and hit > 0
    checks = told(server, pool)
    assert checks["server"][0][0] == checks["connector"][0][0] == checks["pool"][0][0] == "ok"
    assert f"{hit:,.0f} of {queried:,.0f} prompt tokens" in checks["hit rate"][0][1]
    assert any("not in the pool" in detail for _, detail in checks["missed"])


def test_top_shows_what_the_server_does(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    """By the names that this vLLM has for its figures."""
    question = questions["reset"]
    ask_saved_again(server, pages, question)

    def hits() -> None:
        server.reset_prefix_cache()
        server.ask(question.prompt, max_tokens=64)

    shown = top(server, pool, hits, "running", "hit_share", "pool_tokens_s", "load_nbytes_s", "saved_s_s")
    assert {(each["kind"], each["cause"]) for each in shown} == {("vLLM", "")}
    assert "\nvllm:num_requests_waiting{" in (read(f"{server.url}/metrics") or "")


def test_a_page_with_wrong_bytes_and_a_right_checksum_changes_the_text(
    server: Server, pages: Pages, questions: dict[str, Question]
) -> None:
    """The negative control of this whole folder: what is loaded from the pool decides the answer."""
    question = questions["falsified"]
    cached, answer = ask_saved_again(server, pages, question)
    assert answer == question.answer
    server.reset_prefix_cache()
    pages.falsify(question.prompt, page=question.num_full_pages // 2)
    falsified = server.ask(question.prompt, max_tokens=len(question.answer))
    assert falsified.cached_tokens == cached
    assert falsified.token_ids != question.answer


def test_prompts_that_fork_share_the_full_pages_before_the_fork(
    server: Server, pages: Pages, questions: dict[str, Question]
) -> None:
    trunk, fork = questions["fork"], questions["fork/other end"]
    assert server.ask(trunk.prompt, max_tokens=len(trunk.answer)).token_ids == trunk.answer
    pages.wait_for(trunk.prompt)
    server.reset_prefix_cache()
    answer = server.ask(fork.prompt, max_tokens=len(fork.answer))
    assert answer.token_ids == fork.answer
    assert answer.cached_tokens == 400 // PAGE_TOKENS * PAGE_TOKENS


def test_prompt_of_exactly_full_pages_is_loaded_whole(
    server: Server, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["exact"]
    assert len(question.prompt) == question.num_full_pages * PAGE_TOKENS
    cached, answer = ask_saved_again(server, pages, question)
    assert answer == question.answer
    assert cached == len(question.prompt)  # by vLLM's count; it computes the last token again for its logits


def test_prompt_shorter_than_a_page_leaves_the_pool_alone(
    server: Server, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["short"]
    with EmbeddedStore(pool) as store:
        before = store.stats().pages
        for _ in range(2):
            answer = server.ask(question.prompt, max_tokens=len(question.answer))
            assert (answer.token_ids, answer.cached_tokens) == (question.answer, 0)
            server.reset_prefix_cache()
        assert store.stats().pages == before


def test_salted_requests_share_pages_under_the_same_salt_only(
    server: Server, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["salt"]
    full = question.num_full_pages * PAGE_TOKENS

    def cached(salt: str | None) -> int:
        server.reset_prefix_cache()
        answer = server.ask(question.prompt, max_tokens=len(question.answer), cache_salt=salt)
        assert answer.token_ids == question.answer
        pages.wait_for(question.prompt, cache_salt=salt)
        return answer.cached_tokens

    salts = ["tenant a", "tenant b", None]
    assert [cached(salt) for salt in salts] == [0, 0, 0]
    assert [cached(salt) for salt in salts] == [full, full, full]


def assert_unharmed(server: Server, pool: Path, question: Question) -> None:
    """The server holds no block, answers as ever, and every page in the pool is what its writer wrote."""
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "no request runs")
    server.reset_prefix_cache()  # fails while any block is held
    assert server.ask(question.prompt, max_tokens=len(question.answer)).token_ids == question.answer
    with EmbeddedStore(pool) as store:
        report = store.verify()
        assert report.pages > 0
        assert report.corrupt == 0


def count_aborts(server: Server) -> int:
    """Requests that their client left, by the server's log: its metrics do not count them."""
    return server.log_text().count("Aborted request(s)")


def abandon_many(server: Server, prompt: Callable[[], Sequence[int]], step_s: float) -> None:
    """Requests whose client leaves at 16 moments: some come too early or too late, on a busy machine more of them."""
    before = count_aborts(server)
    for slower in (1, 3, 9, 27):
        for step in range(16):
            server.abandon(prompt(), after_s=step * step_s * slower)
        wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "no request runs")
        if count_aborts(server) >= before + 8:
            return
    raise AssertionError(f"only {count_aborts(server) - before} requests were aborted")


def test_aborts_while_saving_hold_no_block_and_store_no_wrong_page(
    server: Server, pool: Path, questions: dict[str, Question]
) -> None:
    source = random.Random(8)
    abandon_many(server, lambda: draw_tokens(source, 1500), 0.04)
    assert_unharmed(server, pool, questions["aborts"])


def test_aborts_while_loading_hold_no_block(
    server: Server, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    prompt = draw_tokens(random.Random(9), 6000)
    server.ask(prompt)
    pages.wait_for(prompt)

    def with_an_empty_cache() -> tuple[int, ...]:
        server.reset_prefix_cache()
        return prompt

    abandon_many(server, with_an_empty_cache, 0.004)
    assert_unharmed(server, pool, questions["aborts"])
    server.reset_prefix_cache()
    assert server.ask(prompt).cached_tokens == len(prompt) // PAGE_TOKENS * PAGE_TOKENS


def test_64_requests_at_once_with_shared_prefixes(server: Server, pages: Pages, questions: dict[str, Question]) -> None:
    crowd = [question for name, question in questions.items() if name.startswith("crowd")]
    crowd *= 4  # every one of the 16 is asked four times at the same time
    assert len(crowd) == 64

    def ask_all() -> list[int]:
        with ThreadPoolExecutor(len(crowd)) as threads:
            answers = list(threads.map(lambda q: server.ask(q.prompt, max_tokens=len(q.answer)), crowd))
        assert [answer.token_ids for answer in answers] == [question.answer for question in crowd]
        return [answer.cached_tokens for answer in answers]

    ask_all()
    for question in crowd:
        pages.wait_for(question.prompt)
    server.reset_prefix_cache()
    before = server.tokens_from_connector()
    cached = ask_all()
    assert min(cached) >= crowd[0].num_full_pages * PAGE_TOKENS
    assert server.tokens_from_connector() > before
