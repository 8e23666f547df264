"""What a person sees of a live server in a terminal 80 columns wide: `top`, `why` and `doctor`."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import pytest
from ground.terminal import Terminal

from e2e.conftest import Shared
from e2e.pages import Pages, wait_for
from mooncake_connector.cli.why.server import look_up

TEXT = " ".join(f"What does a person see of line {number} of this prompt?" for number in range(20))


@pytest.fixture(scope="module")
def last(shared: Shared, qwen3: Path) -> int:
    """The last page of a prompt that the server has stored and does not have itself any more."""
    tokens, pages = look_up(shared.server.url).tokens(TEXT, chat=False), Pages(shared.pool, qwen3)
    shared.server.ask(TEXT, max_tokens=1)
    pages.wait_for(tokens)
    shared.server.reset_prefix_cache()
    return len(tokens) // 64 - 1


def test_why_says_in_words_what_is_there_and_what_is_gone(shared: Shared, qwen3: Path, last: int) -> None:
    asked = ("why", "--url", shared.server.url, "--pool", str(shared.pool), TEXT)
    with Terminal(*asked) as terminal:
        assert f"pages 0-{last} hit" in terminal.printed()
    Pages(shared.pool, qwen3).remove(look_up(shared.server.url).tokens(TEXT, chat=False), 1)
    with Terminal(*asked) as terminal:
        words = " ".join(terminal.printed().split())
        assert re.search(rf"page 0 hit, page 1 removed \d+ s ago.*pages 2-{last} ", words), words


def test_the_doctor_says_in_words_how_the_server_is_doing(shared: Shared, last: int) -> None:
    shared.server.ask(TEXT, max_tokens=1)
    with Terminal("doctor", "--url", shared.server.url, "--pool", str(shared.pool)) as terminal:
        words = " ".join(terminal.printed().split())
    assert f"ok server vLLM at {shared.server.url} ok connector it counts" in words
    assert "prompt tokens beyond the engine's own cache came from the pool" in words, words
    assert "less than a page: only full pages are stored" in words and "set a smaller page_tokens" in words, words


def test_top_draws_what_the_server_does_while_it_does_it(shared: Shared, last: int) -> None:
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            shared.server.reset_prefix_cache()
            shared.server.ask(TEXT, max_tokens=32)

    asking = threading.Thread(target=go_on)
    asked = ("top", "--url", shared.server.url, "--pool", str(shared.pool), "--interval", "0.5")
    with Terminal(*asked) as terminal:
        asking.start()
        try:
            row = rf"\n:{shared.server.url.rpartition(':')[2]} vLLM +\d+\.\d% "
            wait_for(lambda: re.search(row, terminal.frame()) is not None, "its hit rate on the screen")
            assert max(map(len, terminal.frame().splitlines())) <= 80
        finally:
            over.set()
            asking.join()
        assert terminal.ends(signal.SIGINT) == 0
