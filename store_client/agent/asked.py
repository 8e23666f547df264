"""What a process asked of the agent, and what that has said so far; lookups read it, the client writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace

_STALE_S = 5.0
"""An agent repeats every second how an ask stands that is not over."""

Index: TypeAlias = "dict[bytes, Asked]"
"""Of one space: the ask that a key is part of."""


class Asked:
    """What was asked of the agent, and what it has said so far."""

    __slots__ = (
        "_places", "asked_s", "coming", "deadline_s", "done", "heard_s", "index", "is_indexed", "keys", "landed",
        "landed_s", "namespace", "nbytes", "number", "parent", "prefill_tokens_s", "said", "settled", "shard",
    )  # fmt: skip

    def __init__(
        self, namespace: Namespace, shard: Shard, keys: Sequence[bytes], parent: bytes | None, nbytes: int,
        deadline_s: float, prefill_tokens_s: float | None, index: Index,
    ) -> None:  # fmt: skip
        self.namespace, self.shard, self.keys, self.parent, self.nbytes = namespace, shard, keys, parent, nbytes
        self.deadline_s, self.prefill_tokens_s, self.index = deadline_s, prefill_tokens_s, index
        self.asked_s = time.monotonic()
        self.heard_s = 0.0
        """When the agent last said something of it; 0: never yet."""
        self.landed_s = 0.0
        """When it last said that more has landed than it had said before: it repeats itself, and the pool may have lost
        them since; 0: never yet."""
        self.said = 0
        """So many times something about it has changed."""
        self.coming = self.landed = 0
        self.done = self.settled = self.is_indexed = False
        self.number = -1
        self._places: dict[bytes, int] = {}
        """Of each key, once that is asked for."""

    def enter(self) -> None:
        """It was asked. Have all keys found in the index; before, it has the first one alone."""
        self.said += 1
        self.index.update(dict.fromkeys(self.keys, self))
        self.is_indexed = True

    def place(self, key: bytes) -> int:
        """Of a key that the index has."""
        if key == self.keys[0]:
            return 0
        if not self._places:
            self._places = dict(zip(self.keys, range(len(self.keys)), strict=True))
        return self._places.get(key, 0)

    def leave(self) -> None:
        """It has ended, and what it asked for may be asked for again."""
        self.done = True
        self.said += 1
        for key in self.keys if self.is_indexed else self.keys[:1]:
            if self.index.get(key) is self:
                self.index.pop(key, None)

    @property
    def prefill_s(self) -> float | None:
        """What computing the pages takes; None where that is not known."""
        speed = self.prefill_tokens_s
        return len(self.keys) * self.namespace.page_tokens / speed if speed else None

    def is_fresh(self, now_s: float) -> bool:
        """Whether the last word on it still says how it stands."""
        return now_s - self.heard_s < _STALE_S
