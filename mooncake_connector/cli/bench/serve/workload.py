"""What is asked: requests over a few long prefixes, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mooncake_connector.cli.bench.measure import BenchError

T = TypeVar("T")
Prompt = str | list[int]

_WORDS = (
    *("river", "stone", "light", "cold", "market", "paper", "winter", "garden", "music", "silver", "window", "letter"),
    *("summer", "forest", "bridge", "candle", "morning", "table", "harbor", "island", "shadow", "copper"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` prompts, each one of `prefixes` beginnings of `prefix_tokens` and a question of its own."""

    requests: int = 64
    prefixes: int = 16
    prefix_tokens: int = 1536
    question_tokens: int = 32
    answer_tokens: int = 16
    concurrency: int = 4
    rounds: int = 2
    seed: int = 0

    @property
    def request_tokens(self) -> int:
        """Tokens of one request with its answer."""
        return self.prefix_tokens + self.question_tokens + self.answer_tokens

    def check_fits(self, longest: int, whose: str) -> None:
        """Raises BenchError where one request with its answer is longer."""
        if self.request_tokens > longest:
            raise BenchError(
                f"a request of {self.request_tokens:,} tokens does not fit {whose} {longest:,}: give a smaller "
                "--prefix-tokens"
            )

    def order(self, salt: str) -> list[int]:
        """Which prefix each request has: every prefix equally often, in an order drawn from the seed and `salt`."""
        order = [index % self.prefixes for index in range(self.requests)]
        random.Random(f"{self.seed}/{salt}/order").shuffle(order)
        return order


def token_prompts(work: Workload, vocabulary: int, salt: str) -> list[Prompt]:
    """The prompts of one round as token ids."""

    def tokens(count: int, seed: str) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(vocabulary) for _ in range(count)]

    return [*_prompts(work, salt, tokens)]


def text_prompts(work: Workload, tokens_per_word: float, salt: str) -> list[Prompt]:
    """The prompts of one round as text, for a server whose tokenizer is not known; lengths are approximate."""
    drawn = _prompts(work, salt, lambda count, seed: words(max(1, round(count / tokens_per_word)), seed))
    return [" ".join(prompt) for prompt in drawn]


def words(count: int, seed: str) -> list[str]:
    """`count` common English words."""
    draw = random.Random(seed)
    return [draw.choice(_WORDS) for _ in range(count)]


def _prompts(work: Workload, salt: str, draw: Callable[[int, str], list[T]]) -> Iterator[list[T]]:
    """Prefix and question of each request, drawn by count and seed."""
    seed = f"{work.seed}/{salt}"
    prefixes = [draw(work.prefix_tokens, f"{seed}/prefix {index}") for index in range(work.prefixes)]
    for index, prefix in enumerate(work.order(salt)):
        yield prefixes[prefix] + draw(work.question_tokens, f"{seed}/question {index}")
