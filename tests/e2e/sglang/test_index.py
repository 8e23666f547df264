"""What routers are told of a real SGLang is what its device and host memory have, whatever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from e2e.index import Indexed, churn, knows, knows_nothing, losing_for_good
from e2e.questions import draw_tokens
from e2e.sglang.conftest import Attachable
from e2e.sglang_server import SGLangServer

Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def server(attachable: Attachable) -> SGLangServer:
    """Device and host memory alone: what it finds, events have told of."""
    assert attachable.server.admin("DELETE")[0] == 200
    return attachable.server


@pytest.fixture(scope="module")
def indexed(server: SGLangServer, attachable: Attachable) -> Iterator[Indexed]:
    with closing(Indexed(attachable.endpoints, engine="SGLang")) as indexed:
        yield indexed


def test_under_churn_the_index_knows_what_the_server_finds_though_messages_are_lost(
    server: SGLangServer, indexed: Indexed
) -> None:
    """Prompts of 12,000 tokens in all for 8,192 on the device; messages that are lost are replayed."""
    draw = random.Random(5)
    trunks = [draw_tokens(draw, 320) for _ in range(4)]
    prompts = [trunks[number % 4] + draw_tokens(draw, 300 + 41 * number) for number in range(14)]

    def find(prompt: Prompt) -> tuple[int, int]:
        answer = server.ask(prompt, max_tokens=1)
        return answer.cached_tokens - answer.from_host, answer.cached_tokens

    def flush() -> None:
        server.flush()
        knows_nothing(indexed, prompts)

    server.flush()
    churn(indexed, prompts, find, {4: flush}, draw=draw)


def test_what_nobody_replays_is_not_claimed_nor_what_was_known_before(
    server: SGLangServer, indexed: Indexed, attachable: Attachable
) -> None:
    with closing(Indexed(attachable.endpoints, engine="SGLang", replays=False)) as deaf:
        losing_for_good(deaf, indexed, lambda prompt: server.ask(prompt, max_tokens=1), draw=random.Random(6))


def test_what_has_a_salt_is_not_claimed_for_prompts_without(server: SGLangServer, indexed: Indexed) -> None:
    draw = random.Random(7)
    salted, plain = draw_tokens(draw, 330), draw_tokens(draw, 330)
    server.ask(salted, max_tokens=1, cache_salt="a salt")
    server.ask(plain, max_tokens=1)
    knows(indexed, plain)
    assert indexed.of(salted) == 0
    assert indexed.of(salted, salt="a salt") == 320
