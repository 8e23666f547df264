"""Instances and pairs of them, which are closed after the test."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from causes import forget_causes
from simulated.nodes import Instances
from simulated.pair import P_TABLE, Pair
from simulated.waiting import wait_for


@pytest.fixture(autouse=True)
def each_cause_is_logged_again() -> None:
    forget_causes()


@pytest.fixture(autouse=True, scope="module")
def no_process_does_tls_any_more() -> Iterator[None]:
    """It ends with the last transport. Tests of other modules count children, threads and descriptors."""
    yield
    wait_for(lambda: all(thread.name != "mooncake-tls-process" for thread in threading.enumerate()))


@pytest.fixture
def make() -> Iterator[Any]:
    """Makers of prefill instances, which have a request's KV, and of decode instances with other blocks."""
    made: list[Instances] = []

    def prefill(tp_size: int = 1, **options: Any) -> Instances:
        made.append(Instances(tp_size, P_TABLE, **options))
        made[-1].fill()
        return made[-1]

    def decode(tp_size: int = 1, **options: Any) -> Instances:
        made.append(Instances(tp_size, [3, 0, 5, 1], block_tokens=12, order="BLHN", **options))
        return made[-1]

    yield prefill, decode
    for instances in made:
        instances.close()


@pytest.fixture
def make_pair() -> Iterator[Any]:
    made: list[Pair] = []

    def make(*args: Any, **options: Any) -> Pair:
        made.append(Pair(*args, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
