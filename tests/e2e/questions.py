"""Prompts whose greedy answer is worth comparing, with the answer of the engine without us.

Equality of texts says something only if (a) rounding cannot flip a step: every step's best token is clearly ahead of
the next, and (b) the text depends on the cache: the same prompt with another page somewhere has another answer.
`Examiner` asks a plain server and keeps drawing prompts until both hold.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from e2e.client import Answer

__all__ = ["SMALLEST_GAP", "Examiner", "Question", "draw_tokens"]

SMALLEST_GAP = 0.02
"""Rounding in float32 does not flip a step whose best token is so far ahead, in nats."""

PAGE_TOKENS = 64
NUM_BYTES = 256  # the random-weight models know every byte as a token


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the tokens that the plain engine answers it with."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def num_full_pages(self) -> int:
        return len(self.prompt) // PAGE_TOKENS


def draw_tokens(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.randrange(NUM_BYTES) for _ in range(count))


class Plain(Protocol):
    def ask(self, prompt: Sequence[int], *, max_tokens: int, cache_salt: str | None) -> Answer: ...


class Examiner:
    """Finds questions of wanted lengths by asking `plain`, a server without connector.

    Each prompt has a cache salt of its own: it is computed as a whole, and if the server caches prefixes, what it is
    compared with is computed from the first page on that differs.
    """

    def __init__(
        self,
        plain: Plain,
        *,
        max_tokens: int = 6,
        smallest_gap: float = SMALLEST_GAP,
        draws: int = 200,
        draw: Callable[[random.Random, int], tuple[int, ...]] = draw_tokens,
    ) -> None:
        self._plain, self._max_tokens, self._smallest_gap, self._draws = plain, max_tokens, smallest_gap, draws
        self._draw = draw

    def question(self, name: str, num_tokens: int, *, prefix: Sequence[int] = ()) -> Question:
        """A clear question of `num_tokens` tokens that begins with `prefix`; `name` seeds what is drawn."""
        source = random.Random(zlib.crc32(name.encode()))
        for number in range(self._draws):
            prompt = (*prefix, *self._draw(source, num_tokens - len(prefix)))
            salt = f"{name} {number}".replace("/", " ")  # vLLM takes no slash
            answer = self._plain.ask(prompt, max_tokens=self._max_tokens, cache_salt=salt)
            if answer.smallest_gap < self._smallest_gap:
                continue
            if not self._depends_on_every_page(prompt, answer.token_ids, source, salt):
                continue
            return Question(prompt, answer.token_ids)
        raise AssertionError(f"none of {self._draws} prompts drawn for {name!r} has an answer with a clear margin")

    def _depends_on_every_page(
        self, prompt: tuple[int, ...], answer: tuple[int, ...], source: random.Random, salt: str
    ) -> bool:
        """Whether the answer changes when the first, the middle or the last full page is another one."""
        pages = len(prompt) // PAGE_TOKENS
        for page in sorted({0, pages // 2, pages - 1} - {-1}):
            start, stop = page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS
            if stop > len(prompt):
                continue
            other = (*prompt[:start], *self._draw(source, PAGE_TOKENS), *prompt[stop:])
            if self._plain.ask(other, max_tokens=self._max_tokens, cache_salt=salt).token_ids == answer:
                return False
        return True
