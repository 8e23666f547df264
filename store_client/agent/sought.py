"""Which pages of a space the tiers have, as this process asked and the agent has said so far."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace

_GOOD_S = 5.0
"""An answer serves for so long, then the same pages are sought again."""


class Sought:
    """What was asked of the agent. Lookups read it, the client writes it."""

    __slots__ = ("asked_s", "done", "ended_s", "found", "keys", "namespace", "nbytes", "number", "shard")

    def __init__(self, namespace: Namespace, shard: Shard, keys: Sequence[bytes], nbytes: int) -> None:
        self.namespace, self.shard, self.keys, self.nbytes = namespace, shard, keys, nbytes
        self.asked_s = time.monotonic()
        self.found = [False] * len(keys)
        self.done = False
        self.ended_s = self.asked_s
        """When the answer came; where none did it counts from the question."""
        self.number = -1

    def is_good(self, keys: Sequence[bytes], now_s: float) -> bool:
        """Whether it says what is to be known of these keys, which end as its own do."""
        same = len(keys) == len(self.keys) and keys[0] == self.keys[0]
        return same and (not self.done or now_s - self.ended_s < _GOOD_S)

    def enter(self) -> None:
        """It was asked."""

    def leave(self) -> None:
        """It has ended, and what was not heard by now is not found."""
        self.done = True

    def heard(self, found: list[bool], *, done: bool) -> None:
        self.found = found
        if done:
            self.ended_s, self.done = time.monotonic(), True
