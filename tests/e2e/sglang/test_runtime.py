"""The pool is attached, looked at, cleared and detached while the server runs, over SGLang's HTTP API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question
from e2e.sglang.conftest import StartSGLang
from e2e.sglang_server import SGLangServer
from store_client import EmbeddedStore
from store_client.testing import SHARD, chain, namespace, put_chain

NAME = "mooncake_connector"


@pytest.fixture(scope="module")
def server(questions: dict[str, Question], start: StartSGLang) -> SGLangServer:
    """HiCache with two levels; it depends on the questions, so that their server is gone before this one starts."""
    return start(way="no storage", layout="layer_first", io_backend="direct")


@pytest.fixture(scope="module")
def pages(pool: Path, qwen3: Path) -> Pages:
    return Pages(pool, qwen3)


def attach(server: SGLangServer, *, policy: str = "wait_complete", **config: object) -> tuple[int, str]:
    config = {"prefetch_threshold": PAGE_TOKENS, **config}
    return server.admin(
        "PUT",
        body={
            "hicache_storage_backend": NAME,
            "hicache_storage_backend_extra_config_json": json.dumps(config),
            "hicache_storage_prefetch_policy": policy,
        },
    )


def status(server: SGLangServer) -> tuple[str | None, str]:
    """(backend, policy) as the server tells them."""
    code, text = server.admin("GET")
    assert code == 200, text
    told = json.loads(text)
    return told["hicache_storage_backend"], told["hicache_storage_prefetch_policy"]


def hit_tokens(server: SGLangServer, question: Question) -> int:
    """Ask with empty levels of the engine's own; the answer is right. Returns the tokens that came from the pool."""
    server.flush()
    answer = server.ask(question.prompt, max_tokens=len(question.answer))
    assert answer.token_ids == question.answer
    return answer.from_storage


def full(question: Question) -> int:
    return question.num_full_pages * PAGE_TOKENS


@pytest.fixture
def attached(server: SGLangServer) -> None:
    if status(server)[0] is None:
        code, text = attach(server)
        assert code == 200, text


def test_without_the_admin_key_nothing_is_attached(server: SGLangServer) -> None:
    assert server.admin("PUT", body={"hicache_storage_backend": NAME}, key=None)[0] == 401
    assert status(server)[0] is None


def test_a_wrong_setting_is_refused_by_its_name_and_the_server_goes_on(
    server: SGLangServer, questions: dict[str, Question]
) -> None:
    code, text = attach(server, capacitty="1GiB")
    assert code == 400
    assert "capacitty" in text
    server.forgive()  # SGLang logs the exception
    assert status(server)[0] is None
    assert hit_tokens(server, questions["number 0"]) == 0


def test_attached_pool_is_written_and_read(
    server: SGLangServer, attached: None, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    assert status(server) == (NAME, "wait_complete")
    assert hit_tokens(server, question) == 0
    pages.wait_for(question.prompt)
    assert hit_tokens(server, question) == full(question)


def test_attaching_again_changes_the_policy(
    server: SGLangServer, attached: None, questions: dict[str, Question]
) -> None:
    assert attach(server, policy="best_effort")[0] == 200
    assert status(server) == (NAME, "best_effort")
    assert hit_tokens(server, questions["number 0"]) in range(0, full(questions["number 0"]) + 1, PAGE_TOKENS)
    assert attach(server)[0] == 200
    assert status(server) == (NAME, "wait_complete")


def test_clearing_leaves_the_pages_of_others(
    server: SGLangServer, attached: None, pages: Pages, pool: Path, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    hit_tokens(server, question)
    pages.wait_for(question.prompt)
    with EmbeddedStore(pool) as store:
        other, keys = store.space(namespace("another model"), SHARD), chain("another model's", 3)
        put_chain(other, keys)
        assert server.admin("POST", "/clear")[0] == 200
        assert pages.count(question.prompt) == 0
        assert other.lookup(keys).pages == 3
    assert hit_tokens(server, question) == 0
    pages.wait_for(question.prompt)
    assert hit_tokens(server, question) == full(question)


def test_detached_pool_is_left_alone_and_found_again(
    server: SGLangServer, attached: None, pages: Pages, questions: dict[str, Question]
) -> None:
    stored, question = questions["number 0"], questions["fork"]
    hit_tokens(server, stored)
    pages.wait_for(stored.prompt)
    for _ in range(2):
        assert server.admin("DELETE")[0] == 200
    assert status(server)[0] is None
    assert hit_tokens(server, stored) == 0
    assert hit_tokens(server, question) == 0
    assert pages.count(question.prompt) == 0
    assert attach(server)[0] == 200
    assert hit_tokens(server, stored) == full(stored)
