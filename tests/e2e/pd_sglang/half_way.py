"""Hand-overs: one that stays under way, so that what a test does happens in its middle; one that works; one refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from e2e.client import ServerError
from e2e.pages import wait_for
from e2e.pd_sglang.conftest import Pair
from e2e.pd_sglang.instances import LIMIT_S, Both, Instance
from e2e.questions import Question

__all__ = ["CAUSES", "half_way", "hands_over", "is_refused"]

CAUSES = {"secret": "secret", "pages": "page_size=32", "weights": "model"}
"""What is different in a decode instance, and what its answer says of it."""


@contextmanager
def half_way(pair: Pair, question: Question) -> Iterator[Both]:
    """A request of which a part has been sent; the rest waits until `prefill.heal()` or its death."""
    pair.prefill.fault("hold")
    with ThreadPoolExecutor(2) as threads:
        both = Both(threads, *pair.instances, question.prompt, len(question.answer))
        wait_for(lambda: pair.prefill.saw("hold") or both.decode.done(), "a transfer under way", deadline_s=LIMIT_S)
        assert not both.decode.done(), "the request ended before its transfer was under way"
        yield both


def hands_over(pair: Pair, question: Question) -> None:
    """The right answer, through a router, once that has found out that both are there."""
    router, answers = pair.router("sglang-router"), []

    def is_answered() -> bool:
        try:
            answers.append(router.ask_whole(question.prompt, max_tokens=len(question.answer)))
        except ServerError as error:
            if "No available" not in str(error):
                raise
        return bool(answers)

    # What its health checks find it may hear late: of an instance that stood still, after that has answered again.
    wait_for(is_answered, "both instances in the router", deadline_s=LIMIT_S, every_s=0.5)
    assert answers == [question.answer]


def is_refused(pair: Pair, misfit: Instance, difference: str, question: Question) -> None:
    """By name; the pair serves on, though prefill waits a lease for who was refused."""
    with ThreadPoolExecutor(2) as threads:
        failure = Both(threads, pair.prefill, misfit, question.prompt, 4).failure()
        assert CAUSES[difference] in failure, failure
        hands_over(pair, question)
    for instance in (misfit, *pair.instances):
        instance.holds_nothing()
