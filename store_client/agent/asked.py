"""What a process asked of the agent, and what that has said so far; lookups read it, the client writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace

_STALE_S = 5.0
"""An agent repeats every second how an ask stands that is not over."""

Index: TypeAlias = "dict[bytes, tuple[Asked, int]]"
"""Of one space: the ask that a key is part of, and its place there."""


class Asked:
    """What was asked of the agent, and what it has said so far."""

    __slots__ = (
        "asked_s", "coming", "deadline_s", "done", "heard_s", "index", "is_indexed", "keys", "landed", "namespace",
        "nbytes", "number", "parent", "prefill_tokens_s", "settled", "shard",
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
        self.coming = self.landed = 0
        self.done = self.settled = self.is_indexed = False
        self.number = -1

    def is_fresh(self, now_s: float) -> bool:
        """Whether the last word on it still says how it stands."""
        return now_s - self.heard_s < _STALE_S
