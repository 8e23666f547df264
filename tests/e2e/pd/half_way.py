"""A transfer that stays under way, so that what a test does happens in its middle; and that transfers come back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from e2e.pages import wait_for
from e2e.pd.instances import Instance, Proxy
from e2e.questions import Question

__all__ = ["LIMIT_S", "Tokens", "half_way", "hands_over"]

LIMIT_S = 100.0  # beyond transfer_deadline_s of the trio

Tokens = tuple[int, ...]


@contextmanager
def half_way(proxy: Proxy, prefill: Instance, question: Question) -> Iterator[Future[Tokens]]:
    """The answer to a question whose transfer has begun; the rest of it waits until `prefill.heal()` or its death."""
    prefill.fault("hold")
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(lambda: proxy.ask_whole(question.prompt, max_tokens=len(question.answer)))
        wait_for(lambda: prefill.saw("hold") or asking.done(), "a transfer under way", deadline_s=LIMIT_S)
        assert not asking.done(), "the request ended before its transfer was under way"
        yield asking


def hands_over(proxy: Proxy, decode: Instance, question: Question) -> None:
    """The right answer, from KV that travelled: at the latest when what was lost has been noticed."""

    def has_fetched() -> bool:
        decode.reset_prefix_cache()
        before = decode.figure("fetched_tokens")
        assert proxy.ask_whole(question.prompt, max_tokens=len(question.answer)) == question.answer
        return decode.figure("fetched_tokens") > before

    wait_for(has_fetched, "a transfer", deadline_s=LIMIT_S)
