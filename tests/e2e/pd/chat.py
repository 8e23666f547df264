"""Questions that a user asks in a chat: letters, each of them one token of the tests' models."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from e2e.client import Answer, Client

CHAT_TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def draw_letters(source: random.Random, count: int) -> tuple[int, ...]:
    return tuple(source.choices(string.ascii_letters.encode(), k=count))


def as_text(prompt: Sequence[int]) -> str:
    return bytes(prompt).decode()


class Chatting:
    """A server whose answers are those in a chat. Nothing is salted there, since no two prompts begin alike."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, prompt: Sequence[int], *, max_tokens: int, cache_salt: str | None) -> Answer:
        return self._client.chat(as_text(prompt), max_tokens=max_tokens)
