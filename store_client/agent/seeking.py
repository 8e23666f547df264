"""Which of some pages the tiers have, wherever they lie in their chain; none is fetched for that.

All tiers are asked at once, and what each says is told as it comes: one that hangs keeps nothing back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from store_client.agent.source import Source
from store_client.tiers.base import SpaceName

Tell: TypeAlias = Callable[[Sequence[bool], bool], None]
"""Called with what is known by now of each key, and whether that is all."""


class Seeking:
    """See the module. Tiers that are left alone are not asked."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def ask(self, space: SpaceName, keys: Sequence[bytes], nbytes: int, tell: Tell) -> None:
        """As `Fetches.seek`."""
        search = _Search(len(keys), len(self._sources), tell)
        for number, source in enumerate(self._sources):
            look = partial(_look, source, search, number, space, keys, nbytes)
            cause = "" if source.usable() else "open"
            if cause or source.questions.run(look, partial(search.failed, number)):
                search.failed(number, cause)


class _Search:
    """What the tiers have said so far."""

    def __init__(self, num_keys: int, num_tiers: int, tell: Tell) -> None:
        self._lock = threading.Lock()
        self._found = [False] * num_keys
        self._silent = set(range(num_tiers))
        self._tell = tell

    def failed(self, tier: int, cause: str) -> None:
        self.answered(tier, None)

    def answered(self, tier: int, found: Sequence[bool] | None) -> None:
        """`found` None: it did not say. Each tier's first answer counts."""
        with self._lock:
            if tier not in self._silent:
                return
            self._silent.discard(tier)
            if found is not None:
                self._found = [known or here for known, here in zip(self._found, found, strict=True)]
            known, done = self._found, not self._silent
        self._tell(known, done)


def _look(
    source: Source, search: _Search, number: int, space: SpaceName, keys: Sequence[bytes], nbytes: int
) -> None:
    found, _, seconds = source.call(
        source.questions, source.reads,
        lambda deadline_s: source.tier.contains(space, keys, nbytes=nbytes, deadline_s=deadline_s),
    )  # fmt: skip
    if found is not None and len(found) == len(keys):
        source.speed.answered(seconds)
        source.tally.add(asked_pages=len(keys), hit_pages=sum(found))
    else:
        found = None
    search.answered(number, found)
