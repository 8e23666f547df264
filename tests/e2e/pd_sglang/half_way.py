"""A hand-over that stays under way, so that what a test does happens in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from e2e.pages import wait_for
from e2e.pd_sglang.conftest import Pair
from e2e.pd_sglang.instances import LIMIT_S, Both
from e2e.questions import Question

__all__ = ["half_way"]


@contextmanager
def half_way(pair: Pair, question: Question) -> Iterator[Both]:
    """A request of which a part has been sent; the rest waits until `prefill.heal()` or its death."""
    pair.prefill.fault("hold")
    with ThreadPoolExecutor(2) as threads:
        both = Both(threads, *pair.instances, question.prompt, len(question.answer))
        wait_for(lambda: pair.prefill.saw("hold") or both.decode.done(), "a transfer under way", deadline_s=LIMIT_S)
        assert not both.decode.done(), "the request ended before its transfer was under way"
        yield both
