"""Weights of a running SGLang that change: what the old ones computed is not used any more, by whatever way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.pages import PAGE_TOKENS, Pages
from e2e.process import running
from e2e.questions import draw_tokens
from e2e.sglang_server import ADMIN_KEY, SGLangAnswer, SGLangServer
from models import checkpoint

PROMPT = draw_tokens(random.Random(1), 330)
IN_FULL_PAGES = len(PROMPT) // PAGE_TOKENS * PAGE_TOKENS


@pytest.fixture(scope="module")
def server(qwen3: Path, pool: Path, logs: Path) -> Iterator[SGLangServer]:
    """Serves the other weights, with pages in the pool that the first ones computed."""
    server = SGLangServer(qwen3, log=logs / "weight-updates.log", pool=pool)
    with running(server):
        yield server
    assert not server.complaints()


@pytest.fixture(scope="module")
def old(server: SGLangServer, pool: Path) -> SGLangAnswer:
    """The answer of the first weights, read from storage; the server has the other weights from now on."""
    server.ask(PROMPT)
    Pages(pool, server.model).wait_for(PROMPT)
    server.flush()
    old = server.ask(PROMPT)
    assert old.from_storage == IN_FULL_PAGES
    body = {"model_path": str(checkpoint("qwen3-other"))}
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    updated = server._read(server._send("POST", "/update_weights_from_disk", body, headers))
    assert json.loads(updated)["success"] is True
    return old


@pytest.fixture(scope="module")
def new(server: SGLangServer, old: SGLangAnswer) -> SGLangAnswer:
    return server.ask(PROMPT)


def test_pages_of_the_old_weights_are_not_read(old: SGLangAnswer, new: SGLangAnswer) -> None:
    assert (new.from_storage, new.cached_tokens) == (0, 0)
    assert new.steps[0] != old.steps[0]  # the weights did change


def test_nor_are_they_when_the_storage_is_attached_again(server: SGLangServer, new: SGLangAnswer) -> None:
    server.flush()
    assert server.admin("DELETE")[0] == 200
    config = {"prefetch_threshold": PAGE_TOKENS}
    status, told = server.admin(
        "PUT",
        body={
            "hicache_storage_backend": "mooncake_connector",
            "hicache_storage_backend_extra_config_json": json.dumps(config),
            "hicache_storage_prefetch_policy": "wait_complete",
        },
    )
    assert status == 200, told
    assert server.ask(PROMPT).token_ids == new.token_ids
