"""The pool is attached, looked at, cleared and detached while the server runs, over SGLang's HTTP API."""

from __future__ import annotations

import pytest

from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import Question
from e2e.sglang.conftest import NAME, Attachable, full
from store_client import EmbeddedStore
from store_client.testing import SHARD, chain, namespace, put_chain


@pytest.fixture
def detached(attachable: Attachable) -> Attachable:
    assert attachable.server.admin("DELETE")[0] == 200
    return attachable


@pytest.fixture
def attached(attachable: Attachable) -> Attachable:
    attachable.be_attached()
    return attachable


@pytest.fixture(scope="module")
def pages(attachable: Attachable) -> Pages:
    return Pages(attachable.pool, attachable.server.model, lambda: attachable.server)


def test_without_the_admin_key_nothing_is_attached(detached: Attachable) -> None:
    assert detached.server.admin("PUT", body={"hicache_storage_backend": NAME}, key=None)[0] == 401
    assert detached.status()[0] is None


def test_a_wrong_setting_is_refused_by_its_name_and_the_server_goes_on(
    detached: Attachable, questions: dict[str, Question]
) -> None:
    with detached.server.provoked():  # SGLang logs the exception
        code, text = detached.attach(capacitty="1GiB")
    assert code == 400
    assert "capacitty" in text
    assert detached.status()[0] is None
    assert detached.hit_tokens(questions["number 0"]) == 0


def test_attached_pool_is_written_and_read(
    attached: Attachable, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["exact"]
    assert attached.status() == (NAME, "wait_complete")
    assert attached.hit_tokens(question) == 0
    pages.wait_for(question.prompt)
    assert attached.hit_tokens(question) == full(question) - PAGE_TOKENS, "SGLang computes the last token"


def test_attaching_again_changes_the_policy(attached: Attachable, questions: dict[str, Question]) -> None:
    assert attached.attach(policy="best_effort")[0] == 200
    assert attached.status() == (NAME, "best_effort")
    assert attached.hit_tokens(questions["number 0"]) in range(0, full(questions["number 0"]) + 1, PAGE_TOKENS)
    assert attached.attach()[0] == 200
    assert attached.status() == (NAME, "wait_complete")


def test_clearing_leaves_the_pages_of_others(
    attached: Attachable, pages: Pages, questions: dict[str, Question]
) -> None:
    question = questions["number 0"]
    attached.hit_tokens(question)
    pages.wait_for(question.prompt)
    with EmbeddedStore(attached.pool) as store:
        other, keys = store.space(namespace("another model"), SHARD), chain("another model's", 3)
        put_chain(other, keys)
        assert attached.server.admin("POST", "/clear")[0] == 200
        assert pages.count(question.prompt) == 0
        assert other.lookup(keys).pages == 3
    assert attached.hit_tokens(question) == 0
    pages.wait_for(question.prompt)
    assert attached.hit_tokens(question) == full(question)


def test_detached_pool_is_left_alone_and_found_again(
    attached: Attachable, pages: Pages, questions: dict[str, Question]
) -> None:
    stored, question = questions["number 0"], questions["fork"]
    attached.hit_tokens(stored)
    pages.wait_for(stored.prompt)
    for _ in range(2):
        assert attached.server.admin("DELETE")[0] == 200
    assert attached.status()[0] is None
    assert attached.hit_tokens(stored) == 0
    assert attached.hit_tokens(question) == 0
    assert pages.count(question.prompt) == 0
    assert attached.attach()[0] == 200
    assert attached.hit_tokens(stored) == full(stored)
