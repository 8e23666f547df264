"""A vLLM and an SGLang server on one pool, and what each makes of the same prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from e2e.agreement import elements
from e2e.client import Answer
from e2e.pages import PAGE_TOKENS, Pages
from e2e.process import assert_no_complaints, pool_folder
from e2e.questions import draw_tokens
from e2e.server import ONE_CORE, Server
from e2e.sglang_server import ONE_CORE as SGLANG_ONE_CORE
from e2e.sglang_server import SGLangServer

__all__ = ["ENGINES", "Pair", "Trial", "distance", "other", "paired", "prompts"]

ENGINES = ("vLLM", "SGLang")
NUM_TOKENS = 5 * PAGE_TOKENS + 10
LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


def other(engine: str) -> str:
    return ENGINES[1 - ENGINES.index(engine)]


@dataclass
class Trial:
    """One prompt, and the answers of both engines, by engine.

    `computed` came from an engine that found nothing in the pool, `own` from the pages which that left there, `crossed`
    from those of the other engine, and `chunked` from two steps of prefill with a part of the prompt each. `continued`
    is the next turn after a long answer, once with the KV that decoding made and once computed anew. `pages` has the
    elements of the pages that an engine left.
    """

    prompt: tuple[int, ...]
    computed: dict[str, Answer] = field(default_factory=dict)
    own: dict[str, Answer] = field(default_factory=dict)
    crossed: dict[str, Answer] = field(default_factory=dict)
    chunked: dict[str, Answer] = field(default_factory=dict)
    continued: dict[str, tuple[Answer, Answer]] = field(default_factory=dict)
    pages: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def full_tokens(self) -> int:
        return len(self.prompt) // PAGE_TOKENS * PAGE_TOKENS

    def own_spread(self) -> float:
        """How far an engine's own ways to the same answer are apart."""
        ways = [(self.computed[name], way[name]) for name in ENGINES for way in (self.own, self.chunked)]
        return max(distance(one, two) for one, two in (*ways, *self.continued.values()))


class Pair:
    """Both servers. What an engine computes under a salt of its own is kept apart from what the other computes."""

    def __init__(self, model: Path, pool: Path, logs: Path) -> None:
        self.model, self.pool = model, pool
        self.vllm = Server(
            model,
            log=logs / f"pair-{model.name}-vllm.log",
            pool=pool,
            args=["--max-model-len", "4096", "--dtype", "bfloat16"],
            env=ONE_CORE,
        )
        self.sglang = SGLangServer(
            model,
            log=logs / f"pair-{model.name}-sglang.log",
            pool=pool,
            args=["--dtype", "bfloat16"],
            env=SGLANG_ONE_CORE,
        )
        self.pages = Pages(pool, model)

    def ask(self, engine: str, prompt: tuple[int, ...], *, max_tokens: int, cache_salt: str | None = None) -> Answer:
        server = self.vllm if engine == "vLLM" else self.sglang
        return server.ask(prompt, max_tokens=max_tokens, cache_salt=cache_salt)

    def forget(self) -> None:
        """Empty the engines' own caches, so that what they hit afterwards comes from the pool."""
        self.vllm.reset_prefix_cache()
        self.sglang.flush()

    def attempt(self, trial: Trial, max_tokens: int) -> None:
        """Ask both engines everything that a trial is about; vLLM has computed it already, under the salt "vLLM"."""
        prompt = trial.prompt
        trial.computed["SGLang"] = self.ask("SGLang", prompt, max_tokens=max_tokens, cache_salt="SGLang")
        for engine in ENGINES:
            self.pages.wait_for(prompt, cache_salt=engine)
            trial.pages[engine] = elements(self.pool, self.model, prompt, cache_salt=engine)
        self.forget()
        for engine in ENGINES:
            trial.own[engine] = self.ask(engine, prompt, max_tokens=max_tokens, cache_salt=engine)
            trial.crossed[engine] = self.ask(engine, prompt, max_tokens=max_tokens, cache_salt=other(engine))
            chunks, turns = f"{engine} in chunks", f"{engine} in turns"
            self.ask(engine, prompt[: 4 * PAGE_TOKENS], max_tokens=1, cache_salt=chunks)
            trial.chunked[engine] = self.ask(engine, prompt, max_tokens=max_tokens, cache_salt=chunks)
            first = prompt[: 4 * PAGE_TOKENS]
            long = (*first, *self.ask(engine, first, max_tokens=PAGE_TOKENS, cache_salt=turns).token_ids, *prompt[:9])
            hit, anew = (
                self.ask(engine, long, max_tokens=max_tokens, cache_salt=salt) for salt in (turns, f"{turns} anew")
            )
            trial.continued[engine] = hit, anew


@contextmanager
def paired(model: Path, logs: Path) -> Iterator[Pair]:
    """Both servers on a new pool, started at the same time; in the end neither may have logged an error."""
    with pool_folder() as pool:
        pair = Pair(model, pool, logs)
        servers = (pair.vllm, pair.sglang)
        try:
            for server in servers:
                server.start()
            for server in servers:
                server.wait_until_ready()
            yield pair
        finally:
            for server in servers:
                server.stop()
    assert_no_complaints(servers)


def prompts(model: Path) -> Iterator[tuple[int, ...]]:
    """Pieces of the licence for a model of real weights, and tokens without a meaning for one of random weights."""
    if model.name != "smollm2":
        source = random.Random(3)
        while True:
            yield draw_tokens(source, NUM_TOKENS)
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(LICENSE.read_text())["input_ids"]
    for start in range(0, len(tokens) - NUM_TOKENS, 60):
        yield tuple(tokens[start : start + NUM_TOKENS])


def distance(one: Answer, two: Answer) -> float:
    """How far the log-probabilities of likely tokens are apart at most, up to the first step with different tokens.

    Of a token that only one of them has among the likeliest, the other says only that it is less likely than those.
    """
    apart = 0.0
    for token, another, here, there in zip(one.token_ids, two.token_ids, one.steps, two.steps, strict=True):
        for mine, yours in ((here, there), (there, here)):
            least = min(yours.values())
            apart = max([apart, *(abs(mine[name] - yours[name]) for name in mine.keys() & yours.keys())])
            apart = max([apart, *(mine[name] - least for name in mine.keys() - yours.keys())])
        if token != another:
            break
    return apart
