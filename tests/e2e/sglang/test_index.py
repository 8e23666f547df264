"""What routers are told of a real SGLang is what its device and host memory have, whatever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from e2e.index import Indexed
from e2e.pages import PAGE_TOKENS, wait_for
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


def whole(prompt: Prompt) -> int:
    return len(prompt) // PAGE_TOKENS * PAGE_TOKENS


def knows(indexed: Indexed, prompt: Prompt) -> None:
    """Events come in order: once the last prompt is known, so is what went for it."""
    wait_for(lambda: indexed.of(prompt, "GPU") == whole(prompt), "the prompt in the index")


def test_under_churn_the_index_knows_what_the_server_finds_though_messages_are_lost(
    server: SGLangServer, indexed: Indexed
) -> None:
    """Prompts of 12,000 tokens in all for 8,192 on the device; messages that are lost are replayed."""
    draw = random.Random(5)
    trunks = [draw_tokens(draw, 320) for _ in range(4)]
    prompts = [trunks[number % 4] + draw_tokens(draw, 300 + 41 * number) for number in range(14)]
    server.flush()
    seen: set[tuple[bool, bool]] = set()
    for step in range(30):
        prompt = draw.choice(prompts)
        if step == 4:
            server.flush()
            indexed_nothing(indexed, prompts)
        if step % 6 == 3:
            lost, indexed.loses = indexed.lost, True
            server.ask(draw_tokens(draw, 700), max_tokens=1)
            wait_for(lambda lost=lost: indexed.lost > lost, "a message that is lost")
            indexed.loses = False
            news = draw_tokens(draw, 200)  # by the next one it is seen that one is missing
            server.ask(news, max_tokens=1)
            knows(indexed, news)
        told = indexed.of(prompt, "GPU"), indexed.of(prompt)
        answer = server.ask(prompt, max_tokens=1)
        assert told == (answer.cached_tokens - answer.from_host, answer.cached_tokens), step
        seen.add((told[0] > 0, told[1] > told[0]))  # on the device, and beyond that on the host
        knows(indexed, prompt)
    assert {(False, False), (True, False), (True, True)} <= seen
    assert indexed.lost and indexed.counted("gaps") and not indexed.counted("failed_replays")
    assert not indexed.counted("unplaced_blocks") and not indexed.counted("junk")


def indexed_nothing(indexed: Indexed, prompts: list[Prompt]) -> None:
    wait_for(lambda: not any(indexed.of(prompt) for prompt in prompts), "an index that knows of nothing")


def test_what_nobody_replays_is_not_claimed_nor_what_was_known_before(
    server: SGLangServer, indexed: Indexed, attachable: Attachable
) -> None:
    draw = random.Random(6)
    before, lost, after = (draw_tokens(draw, 330) for _ in range(3))
    with closing(Indexed(attachable.endpoints, engine="SGLang", replays=False)) as deaf:
        wait_for(lambda: bool(server.ask(draw_tokens(draw, 130), max_tokens=1)) and deaf.counted("events"), "events")
        server.ask(before, max_tokens=1)
        knows(deaf, before)
        deaf.loses = True
        server.ask(lost, max_tokens=1)
        knows(indexed, lost)
        number = indexed.number
        wait_for(lambda: deaf.number >= number and deaf.lost > 0, "messages that are lost")
        deaf.loses = False
        server.ask(after, max_tokens=1)
        knows(deaf, after)
        assert (deaf.of(before, "GPU"), deaf.of(lost, "GPU")) == (0, 0), "copies on the host are told of later"
    knows(indexed, after)
    assert indexed.of(before) == whole(before), "who can ask for it knows it all"


def test_what_has_a_salt_is_not_claimed_for_prompts_without(server: SGLangServer, indexed: Indexed) -> None:
    draw = random.Random(7)
    salted, plain = draw_tokens(draw, 330), draw_tokens(draw, 330)
    server.ask(salted, max_tokens=1, cache_salt="a salt")
    server.ask(plain, max_tokens=1)
    knows(indexed, plain)
    assert indexed.of(salted) == 0
    assert indexed.of(salted, salt="a salt") == whole(salted)
