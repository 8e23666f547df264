"""What is asked: requests over a few long prefixes, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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

    def order(self, salt: str) -> list[int]:
        """Which prefix each request has: every prefix equally often, in an order drawn from the seed and `salt`."""
        order = [index % self.prefixes for index in range(self.requests)]
        random.Random(f"{self.seed}/{salt}/order").shuffle(order)
        return order


def token_prompts(work: Workload, vocabulary: int, salt: str) -> list[Prompt]:
    """The prompts of one round as token ids."""

    def tokens(name: str, count: int) -> list[int]:
        draw = random.Random(f"{work.seed}/{salt}/{name}")
        return [draw.randrange(vocabulary) for _ in range(count)]

    prefixes = [tokens(f"prefix {index}", work.prefix_tokens) for index in range(work.prefixes)]
    return [
        prefixes[prefix] + tokens(f"question {index}", work.question_tokens)
        for index, prefix in enumerate(work.order(salt))
    ]


def text_prompts(work: Workload, tokens_per_word: float, salt: str) -> list[Prompt]:
    """The prompts of one round as text, for a server whose tokenizer is not known; lengths are approximate."""

    def text(name: str, count: int) -> str:
        return words(max(1, round(count / tokens_per_word)), f"{work.seed}/{salt}/{name}")

    prefixes = [text(f"prefix {index}", work.prefix_tokens) for index in range(work.prefixes)]
    return [
        f"{prefixes[prefix]} {text(f'question {index}', work.question_tokens)}"
        for index, prefix in enumerate(work.order(salt))
    ]


def words(count: int, seed: str) -> str:
    """`count` common English words."""
    draw = random.Random(seed)
    return " ".join(draw.choice(_WORDS) for _ in range(count))


def first_of_each(order: Sequence[int]) -> list[int]:
    """The index of the first request for each prefix."""
    return [order.index(prefix) for prefix in sorted(set(order))]
