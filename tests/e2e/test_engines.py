"""vLLM and SGLang on one pool: what one computed the other loads, with the same text.

The engines' kernels round differently, and a near tie between two tokens falls either way in each engine alone. So what
is shown is: the pages of both agree within rounding, page by page and layer by layer, where any mistake in order, rope
or packing is off by far more; prompts with a clear margin at every step have the same text whoever computed and whoever
loaded; and elsewhere a hit on the other's pages moves log-probabilities no further than an engine's own paths do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from long_form import LONG

from e2e.agreement import errors, exact_elements, mistakes, table
from e2e.client import Answer
from e2e.pages import wait_for
from e2e.pair import ENGINES, Pair, Trial, distance, other, paired, prompts
from e2e.process import running
from e2e.server import Server
from e2e.sglang_server import SGLangServer
from models import checkpoint

pytestmark = pytest.mark.long

MAX_TOKENS = 4
# Logits are bfloat16: of the real model they are large, so that a rounding moves them by up to 0.125.
CLEAR = {"smollm2": 0.5, "qwen3": 0.12}
TIED = {"smollm2": 0.13, "qwen3": 0.04}

LARGEST_MEAN_ERROR = 0.05
LARGEST_ERROR = 1.5
LEAST_OF_A_MISTAKE = 15
"""A mistake's mean error over the right pages'."""


@pytest.fixture(scope="module", params=["qwen3", "smollm2"] if LONG else ["qwen3"])
def pair(request: pytest.FixtureRequest, logs: Path) -> Iterator[Pair]:
    """On SmolLM2 the demo of both engines shows a hit and its text; the rest takes it minutes."""
    with paired(checkpoint(request.param), logs) as pair:
        yield pair


@pytest.fixture(scope="module")
def trials(pair: Pair) -> dict[str, list[Trial]]:
    """Trials of prompts with a clear margin at every step of vLLM's answer ("clear"), and of near ties ("tied")."""
    wanted = {"clear": 3, "tied": 1}
    found: dict[str, list[Trial]] = {name: [] for name in wanted}
    for prompt in prompts(pair.model):
        answer = pair.ask("vLLM", prompt, max_tokens=MAX_TOKENS, cache_salt="vLLM")
        gap = answer.smallest_gap
        kind = "clear" if gap >= CLEAR[pair.model.name] else "tied" if gap <= TIED[pair.model.name] else None
        if kind is not None and len(found[kind]) < wanted[kind]:
            trial = Trial(prompt, computed={"vLLM": answer})
            pair.attempt(trial, MAX_TOKENS)
            found[kind].append(trial)
        if all(len(found[name]) == count for name, count in wanted.items()):
            return found
    raise AssertionError(f"not enough prompts of each kind: {found}")


@pytest.fixture
def every(trials: dict[str, list[Trial]]) -> list[Trial]:
    return [*trials["clear"], *trials["tied"]]


def test_an_engine_loads_all_full_pages_that_the_other_computed(every: list[Trial]) -> None:
    for trial in every:
        for engine in ENGINES:
            assert trial.computed[engine].cached_tokens == 0, "the other's pages have another salt"
            assert trial.crossed[engine].cached_tokens == trial.full_tokens


def test_prompts_with_a_clear_margin_have_one_text(trials: dict[str, list[Trial]]) -> None:
    for trial in trials["clear"]:
        answers = [*trial.computed.values(), *trial.own.values(), *trial.crossed.values(), *trial.chunked.values()]
        assert {answer.token_ids for answer in answers} == {trial.computed["vLLM"].token_ids}


def test_a_hit_on_the_others_pages_is_as_near_as_an_engines_own_ways(every: list[Trial]) -> None:
    """Its own ways: the whole prompt, a hit on its own pages, chunks, and KV that decoding made against prefill's."""
    own = max(trial.own_spread() for trial in every)
    crossed = {
        engine: max(distance(trial.computed[engine], trial.crossed[engine]) for trial in every) for engine in ENGINES
    }
    other_texts = sum(
        trial.computed[name].token_ids != trial.crossed[name].token_ids for trial in every for name in ENGINES
    )
    print(f"nats at most: own ways {own:.3f}, hits on the other's pages {crossed}; texts that differ: {other_texts}")
    assert own > 0
    assert max(crossed.values()) <= 2 * own


def test_every_page_of_both_engines_agrees_in_every_layer(pair: Pair, every: list[Trial], logs: Path) -> None:
    """With each other, and with what an independent implementation computes in float32."""
    vllm, sglang = (np.concatenate([trial.pages[engine] for trial in every], axis=2) for engine in ENGINES)
    exact = np.concatenate(exact_elements(pair.model, (trial.prompt for trial in every)), axis=2)
    (logs / f"agreement-{pair.model.name}.md").write_text(table(vllm, sglang, exact))
    for one, two in ((vllm, sglang), (exact, vllm), (exact, sglang)):
        largest, mean = errors(one, two)
        assert mean.max() <= LARGEST_MEAN_ERROR
        assert largest.max() <= LARGEST_ERROR


def test_a_mistake_in_the_pages_would_be_seen_in_every_page_and_layer(pair: Pair, every: list[Trial]) -> None:
    pages = every[0].pages
    _, right = errors(pages["vLLM"], pages["SGLang"])
    for name, (make, spoilt) in mistakes(pair.model).items():
        _, wrong = errors(pages["vLLM"], make(pages["SGLang"]))
        for half in spoilt:
            assert wrong[half].min() > 2 * LARGEST_MEAN_ERROR, name
            assert (wrong[half].mean(axis=1) > LEAST_OF_A_MISTAKE * right[half].mean(axis=1)).all(), name


def test_both_at_once_share_what_they_compute(pair: Pair, trials: dict[str, list[Trial]]) -> None:
    """Each computes one half of the prompts while the other computes the rest; then both ask for the other half."""
    halves = {"vLLM": trials["clear"][:2], "SGLang": trials["clear"][2:]}

    def all_ask(work: dict[str, list[Trial]]) -> dict[str, list[int]]:
        """What of each prompt was not computed, by engine."""
        cached: dict[str, list[int]] = {}
        with ThreadPoolExecutor() as threads:
            pending = {
                engine: [threads.submit(pair.ask, engine, trial.prompt, max_tokens=MAX_TOKENS) for trial in mine]
                for engine, mine in work.items()
            }
            for engine, answers in pending.items():
                cached[engine] = [answer.result().cached_tokens for answer in answers]
                for trial, answer in zip(work[engine], answers, strict=True):
                    assert answer.result().token_ids == trial.computed["vLLM"].token_ids
        return cached

    assert all_ask(halves) == {"vLLM": [0, 0], "SGLang": [0]}
    for trial in trials["clear"]:
        pair.pages.wait_for(trial.prompt)
    swapped = {engine: halves[other(engine)] for engine in ENGINES}
    full = trials["clear"][0].full_tokens
    assert all_ask(swapped) == {"vLLM": [full], "SGLang": [full, full]}
    pair.forget()
    assert all_ask(dict.fromkeys(ENGINES, trials["clear"])) == {engine: [full] * 3 for engine in ENGINES}


@pytest.mark.parametrize("writer", ENGINES)
def test_what_the_other_left_in_the_pool_decides_the_text(
    writer: str, pair: Pair, trials: dict[str, list[Trial]]
) -> None:
    """The negative control: the reader's text is another one if one page of the writer's has other bytes."""
    trial, reader = trials["clear"][ENGINES.index(writer)], other(writer)
    salt = f"falsified for {reader}"
    pair.ask(writer, trial.prompt, max_tokens=1, cache_salt=salt)
    pair.pages.wait_for(trial.prompt, cache_salt=salt)
    pair.pages.falsify(trial.prompt, page=2, cache_salt=salt)
    answer = pair.ask(reader, trial.prompt, max_tokens=MAX_TOKENS, cache_salt=salt)
    assert answer.cached_tokens == trial.full_tokens
    assert answer.token_ids != trial.computed[reader].token_ids
    assert distance(answer, trial.computed[reader]) > 2 * trial.own_spread(), "the bound on hits would see it as well"


@dataclass(frozen=True, slots=True)
class Stranger:
    """A server that shares the pool, and should share nothing in it."""

    ask: Callable[..., Answer]
    forget: Callable[[], None]
    page_tokens: int


@pytest.fixture(params=["vLLM of float16", "SGLang of 128 tokens a page"])
def stranger(request: pytest.FixtureRequest, pair: Pair, logs: Path) -> Iterator[Stranger]:
    """An instance of the same model on the same pool that has no use for the others' pages.

    That float16 and other page sizes have names of their own in both engines is `test_strangers.py`'s.
    """
    log = logs / f"{request.param.replace(' ', '-')}.log"
    if request.param.startswith("vLLM"):
        vllm = Server(pair.model, log=log, pool=pair.pool, args=["--max-model-len", "4096", "--dtype", "float16"])
        with running(vllm):
            yield Stranger(vllm.ask, vllm.reset_prefix_cache, 64)
    else:
        sglang = SGLangServer(pair.model, log=log, pool=pair.pool, args=["--page-size", "128", "--dtype", "bfloat16"])
        with running(sglang):
            yield Stranger(sglang.ask, sglang.flush, 128)


@pytest.mark.skipif(not LONG, reason="it has a long form alone (`make test-long`)")
@pytest.mark.parametrize("pair", ["qwen3"], indirect=True)
def test_an_instance_of_another_dtype_or_page_size_finds_its_own_pages_alone(
    pair: Pair, trials: dict[str, list[Trial]], stranger: Stranger
) -> None:
    prompt = trials["clear"][0].prompt
    for salt in ENGINES:  # both engines left the pages of this prompt under their names
        assert stranger.ask(prompt, max_tokens=1, cache_salt=salt).cached_tokens == 0

    def hit() -> int:
        stranger.forget()
        return stranger.ask(prompt, max_tokens=1, cache_salt="vLLM").cached_tokens

    wait_for(lambda: hit() == len(prompt) // stranger.page_tokens * stranger.page_tokens, "a hit on its own pages")
