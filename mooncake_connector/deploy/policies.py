"""How the built-in router chooses among instances: in turn, by load, or by load and by what each has in its cache."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

CACHE_WEIGHT, REQUEST_WEIGHT, PREFILL_WEIGHT = 2.0, 1.0, 1.0
"""Chosen on one recorded trace, and held against another: docs/benchmarks.md."""
FEW_REQUESTS = 16
"""While the least loaded has fewer, so many more requests are a load of 1."""


class Load(Protocol):
    """What is known of an instance."""

    @property
    def url(self) -> str: ...

    @property
    def load(self) -> int:
        """Requests under way."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens that it has still to compute before it can answer what it was sent."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One to be computed.

    Args:
        tokens: how long it is, counted or estimated.
        cached: how many of them an instance has, by its URL; 0 for others.
        chunks: what a `History` knows it by.
    """

    tokens: int
    cached: Mapping[str, int] = field(default_factory=dict)
    chunks: Sequence[int] = ()

    def ratio(self, url: str) -> float:
        """How much of it is cached, from 0 to 1, whatever an index says."""
        return min(1.0, max(0, self.cached.get(url, 0)) / self.tokens) if self.tokens > 0 else 0.0

    def left_for(self, one: Load) -> int:
        """Tokens that this instance would have to compute."""
        return round(self.tokens * (1.0 - self.ratio(one.url)))


class Policy(Protocol):
    """Which of some instances gets a request."""

    def choose(self, instances: Sequence[Load], prompt: Prompt | None) -> int:
        """A position in `instances`, which has at least one, in the order of whose turn it is."""


class RoundRobin:
    """Whose turn it is."""

    def choose(self, instances: Sequence[Load], prompt: Prompt | None) -> int:
        return 0


class LeastLoaded:
    """The one with the fewest requests under way."""

    def choose(self, instances: Sequence[Load], prompt: Prompt | None) -> int:
        return min(range(len(instances)), key=lambda at: instances[at].load)


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each term of `Conductor` counts."""

    cache: float = CACHE_WEIGHT
    requests: float = REQUEST_WEIGHT
    prefill: float = PREFILL_WEIGHT


class Conductor:
    """By score: weight times cache ratio, less weight times request load, less weight times prefill load.

    The form is that of public gateways that ask Mooncake's Conductor or a centre like it (aigw's `inference_lb`). No
    term has a unit. The cache ratio is the part of the prompt that an instance has, from 0 to 1. The loads say how
    much more than the least loaded an instance has to do: in requests, as a multiple of what the least loaded has; in
    tokens to compute, as a multiple of this prompt, or of the mean of all where that is more. So a long prompt is
    worth a wait for what is cached, and a prefix that everybody wants does not stay where it is: its instance gets
    that much more than the others and no more, and these have it as well from then on.

    Args:
        candidates: among so many of the best one is drawn, so that routers that do not see each other keep apart.
    """

    def __init__(self, weights: Weights, candidates: int = 1, draw: random.Random | None = None) -> None:
        self._weights, self._candidates, self._draw = weights, candidates, draw or random.Random()

    def scores(self, instances: Sequence[Load], prompt: Prompt | None) -> list[float]:
        """Of each instance, the higher the better; without a prompt by requests alone."""
        loads, work = [one.load for one in instances], [one.prefill_tokens for one in instances]
        requests = _above(min(loads), loads, max(FEW_REQUESTS, min(loads)))
        if prompt is None:
            return [-load for load in requests]
        prefill = _above(min(work), work, max(1, prompt.tokens, sum(work) / len(work)))
        of = self._weights
        return [
            of.cache * prompt.ratio(one.url) - of.requests * requests[at] - of.prefill * prefill[at]
            for at, one in enumerate(instances)
        ]

    def choose(self, instances: Sequence[Load], prompt: Prompt | None) -> int:
        scores = self.scores(instances, prompt)
        best = sorted(range(len(scores)), key=lambda at: -scores[at])  # of equal ones, whose turn it is
        return best[0] if self._candidates == 1 else self._draw.choice(best[: self._candidates])


def _above(least: int, loads: Sequence[int], unit: float) -> list[float]:
    return [(load - least) / unit for load in loads]
