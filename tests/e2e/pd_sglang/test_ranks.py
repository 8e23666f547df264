"""Instances of one rank and of several hand over to each other: tensor parallel, and pipelines that prefill."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from long_form import LONG

from e2e.pd_sglang.conftest import CHUNK_TOKENS, COMMON, Asked, Pair, reached
from e2e.pd_sglang.instances import Both, Instance
from e2e.process import running

pytestmark = [pytest.mark.long, pytest.mark.skipif(not LONG, reason="it has a long form alone (`make test-long`)")]

CHUNKS = ("--chunked-prefill-size", str(CHUNK_TOKENS))
SHAPES = {
    "TP 1 to 2": ("decode", ("--tp-size", "2")),
    "TP 2 to 1": ("prefill", ("--tp-size", "2", *CHUNKS)),
    "PP 2 to 1": ("prefill", ("--pp-size", "2", *CHUNKS)),
}
"""Which side has several ranks, and how it is started; the other one is that of the pair, of one rank."""

CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""SGLang wants to know the cores of each rank where there are more ranks than NUMA nodes."""

Sides = tuple[Instance, Instance]


@pytest.fixture(scope="module", params=SHAPES)
def several(request: pytest.FixtureRequest, started: Pair, qwen3: Path, logs: Path) -> Iterator[Sides]:
    """A prefill and a decode instance."""
    role, args = SHAPES[request.param]
    log = logs / f"pd-sglang-{request.param.replace(' ', '-')}.log"
    config = reached(started.secret)
    made = Instance(qwen3, role, log=log, config=config, args=(*COMMON, *args), env=CORES)  # type: ignore[arg-type]
    with running(made):
        yield (made, started.decode) if role == "prefill" else (started.prefill, made)
    assert not made.complaints(), "\n".join(made.complaints()[:20])


@pytest.fixture
def sides(several: Sides, pair: Pair) -> Sides:
    for instance in several:
        instance.heal()
        instance.holds_nothing()
    return several


def test_the_answer_is_that_of_one_rank(sides: Sides, asked: Asked) -> None:
    with ThreadPoolExecutor(2) as threads:
        for name in ("short", "pages", "several", "chunks"):
            question = asked[name]
            both = Both(threads, *sides, question.prompt, len(question.answer))
            assert both.answer() == question.answer, name


def test_several_requests_at_once(sides: Sides, asked: Asked) -> None:
    crowd = asked.crowd * 2
    with ThreadPoolExecutor(2 * len(crowd)) as threads:
        asking = [Both(threads, *sides, question.prompt, len(question.answer)) for question in crowd]
        assert [both.answer() for both in asking] == [question.answer for question in crowd]
    for instance in sides:
        instance.holds_nothing()


def test_the_answer_depends_on_the_bytes_that_travel(sides: Sides, asked: Asked) -> None:
    question = asked["chunks"]
    sides[0].fault("falsify")
    with ThreadPoolExecutor(2) as threads:
        assert Both(threads, *sides, question.prompt, len(question.answer)).answer() != question.answer
    assert sides[0].saw("falsify")


def test_a_transfer_that_fails_on_one_rank_fails_its_request_alone(sides: Sides, asked: Asked) -> None:
    """Bytes that are wrong twice: the request fails on every rank, all pages come back, the next one is served."""
    question = asked["several"]
    sides[1].fault("corrupt")
    with ThreadPoolExecutor(2) as threads:
        assert Both(threads, *sides, question.prompt, len(question.answer)).failure()
        sides[1].heal()
        assert Both(threads, *sides, question.prompt, len(question.answer)).answer() == question.answer
    for instance in sides:
        instance.holds_nothing()
