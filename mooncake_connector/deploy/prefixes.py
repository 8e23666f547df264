"""Where the built-in router knows from how much of a prompt each instance has in its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from mooncake_connector.deploy.bodies import Body
from mooncake_connector.deploy.history import History
from mooncake_connector.deploy.instances import Instance
from mooncake_connector.deploy.policies import Prompt
from mooncake_connector.deploy.prompts import CHUNK_TOKENS, chunks_of, text_of, tokens_in

HISTORY_CHUNKS = 1 << 14


class Prefixes(Protocol):
    outcomes: Counter[str]
    """Requests by what became of asking, where somebody is asked."""

    async def find(self, body: Body, headers: dict[bytes, bytes], among: Sequence[Instance]) -> Prompt:
        """The prompt of a request, and what instances have of it, as far as is known. Raises nothing."""

    def sent(self, prompt: Prompt, one: Instance) -> None:
        """An instance computes it."""


class Routed:
    """From what this router itself has sent to each instance; nobody is asked."""

    def __init__(self, most_chunks: int = HISTORY_CHUNKS) -> None:
        self._history = History(most_chunks)
        self.outcomes: Counter[str] = Counter()

    async def find(self, body: Body, headers: dict[bytes, bytes], among: Sequence[Instance]) -> Prompt:
        text = text_of(body)
        chunks = chunks_of(text)
        cached = {one.url: self._history.matched(one.url, chunks) * CHUNK_TOKENS for one in among}
        return Prompt(tokens_in(text), cached, chunks)

    def sent(self, prompt: Prompt, one: Instance) -> None:
        self._history.note(one.url, prompt.chunks)
