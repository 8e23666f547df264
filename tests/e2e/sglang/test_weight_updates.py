"""Weights of a running SGLang that change: what the old ones computed is not used any more, by whatever way."""

from __future__ import annotations

import json
import random

import pytest

from e2e.pages import PAGE_TOKENS, Pages
from e2e.questions import draw_tokens
from e2e.sglang.conftest import Attachable
from e2e.sglang_server import ADMIN_KEY, SGLangAnswer, SGLangServer
from models import checkpoint

PROMPT = draw_tokens(random.Random(1), 330)
IN_FULL_PAGES = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS


@pytest.fixture(scope="module")
def server(attachable: Attachable) -> SGLangServer:
    """Serves the other weights in the end, with pages in the pool that the first ones computed."""
    attachable.be_attached()
    return attachable.server


@pytest.fixture(scope="module")
def old(server: SGLangServer, attachable: Attachable) -> SGLangAnswer:
    """The answer of the first weights, read from storage; the server has the other weights from now on."""
    server.ask(PROMPT)
    Pages(attachable.pool, server.model, lambda: server).wait_for(PROMPT)
    server.flush()
    old = server.ask(PROMPT)
    assert old.from_storage == IN_FULL_PAGES
    load_weights(server, "qwen3-other")
    return old


def load_weights(server: SGLangServer, name: str, *, flush: bool = True) -> None:
    """Of the checkpoint `name`; `flush`: SGLang's own caches with it."""
    body = {"model_path": str(checkpoint(name)), "flush_cache": flush}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    updated = server._read(server._send("POST", "/update_weights_from_disk", body, headers))
    assert json.loads(updated)["success"] is True


@pytest.fixture(scope="module")
def new(server: SGLangServer, old: SGLangAnswer) -> SGLangAnswer:
    return server.ask(PROMPT)


def test_pages_of_the_old_weights_are_not_read(old: SGLangAnswer, new: SGLangAnswer) -> None:
    assert (new.from_storage, new.cached_tokens) == (0, 0)
    assert new.steps[0] != old.steps[0]  # the weights did change


def test_nor_are_they_when_the_storage_is_attached_again(attachable: Attachable, new: SGLangAnswer) -> None:
    attachable.server.flush()
    assert attachable.server.admin("DELETE")[0] == 200
    attachable.be_attached()
    assert attachable.server.ask(PROMPT).token_ids == new.token_ids


def test_nor_is_what_sglang_kept_of_them_and_stores_before_its_flush(attachable: Attachable) -> None:
    """With write_through_selective a prompt is stored once it is asked again: here as KV of the weights before."""
    server, pages = attachable.server, Pages(attachable.pool, attachable.server.model)
    prompt = draw_tokens(random.Random(2), 330)
    assert attachable.attach(write_policy="write_through_selective")[0] == 200
    try:
        load_weights(server, "qwen3")
        server.ask(prompt)
        load_weights(server, "qwen3-other", flush=False)
        kept = server.ask(prompt)
        assert kept.cached_tokens == IN_FULL_PAGES
        pages.wait_for(prompt)
        server.flush()
        fresh = server.ask(prompt)
        assert (fresh.from_storage, fresh.cached_tokens) == (0, 0) and fresh.steps[0] != kept.steps[0]
    finally:
        assert attachable.attach()[0] == 200
