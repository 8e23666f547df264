"""Which shards of a namespace the tiers have: instances with another TP or PP size than the asking one stored them.

Each tier is asked in the background, and what it said is good for a while: no wish waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.agent.source import Source

_GOOD_S = 60.0
"""What a tier said, where the shards that it named are a whole model."""
_ELSE_GOOD_S = 10.0
"""Where they are not, or there are none: more of them may be on their way."""
_MOST_SHARDS = 64
_MOST_NAMESPACES = 256

Tell: TypeAlias = Callable[[Sequence[Shard], bool], None]


@dataclass(slots=True)
class _Known:
    """What one tier said of a namespace."""

    shards: frozenset[Shard] = frozenset()
    good_until_s: float = 0.0
    asking: bool = False


class Splits:
    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._known: dict[bytes, list[_Known]] = {}
        """By namespace, for each tier."""
        self._listening: dict[bytes, list[Tell]] = {}

    def ask(self, namespace: Namespace, tell: Tell) -> None:
        """As `Fetches.shards`."""
        now_s, digest = time.monotonic(), namespace.digest
        with self._lock:
            known = self._known_of(digest)
            stale = [n for n, one in enumerate(known) if now_s >= one.good_until_s and not one.asking]
            for number in stale:
                known[number].asking = True
            done = not any(one.asking for one in known)
            if not done:
                self._listening.setdefault(digest, []).append(tell)
            shards = self._shards(known)
        tell(shards, done)
        for number in stale:
            source = self._sources[number]
            given_up = partial(self._answered, namespace, known, number, None)
            cause = "" if source.usable() else "open"
            cause = cause or source.surveys.run(partial(self._look, namespace, known, number), given_up)
            if cause:
                given_up(cause)

    def _known_of(self, digest: bytes) -> list[_Known]:
        """Empty where so many namespaces are being asked for that no further one is."""
        if digest not in self._known and len(self._known) >= _MOST_NAMESPACES:
            self._known = {each: known for each, known in self._known.items() if any(one.asking for one in known)}
            if len(self._known) >= _MOST_NAMESPACES:
                return []
        return self._known.setdefault(digest, [_Known() for _ in self._sources])

    def _look(self, namespace: Namespace, known: list[_Known], number: int) -> None:
        source = self._sources[number]
        found, cause, _ = source.call(
            source.surveys, source.lists,
            lambda deadline_s: source.tier.shards(namespace.digest, deadline_s=deadline_s),
        )  # fmt: skip
        self._answered(namespace, known, number, found, cause)

    def _answered(
        self, namespace: Namespace, known: list[_Known], number: int, found: Sequence[Shard] | None, cause: str
    ) -> None:
        """`found` None: the tier did not say, for `cause`, which is counted; what it said before holds."""
        layers, heads = namespace.num_layers, namespace.num_kv_heads
        with self._lock:
            one = known[number]
            if found is not None:
                one.shards = frozenset(each for each in found if each.layer_stop <= layers and each.head_stop <= heads)
            one.asking = False
            whole = Shard(0, layers, 0, heads)
            complete = all(any(each.covers(cell) for each in one.shards) for cell in whole.cut(one.shards))
            one.good_until_s = time.monotonic() + (_GOOD_S if complete else _ELSE_GOOD_S)
            listening = list(self._listening.get(namespace.digest, ()))
            done = not any(each.asking for each in known)
            if done:
                self._listening.pop(namespace.digest, None)
            shards = self._shards(known)
        for tell in listening:
            tell(shards, done)

    @staticmethod
    def _shards(known: list[_Known]) -> list[Shard]:
        """The largest ones, where there are more than anybody takes."""
        every = frozenset[Shard]().union(*(one.shards for one in known))
        return sorted(every, key=lambda shard: (-shard.num_units, shard.layer_start, shard.head_start))[:_MOST_SHARDS]
