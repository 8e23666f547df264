"""Namespaces and shards under the numbers that the agent knows them by, and which shards the tiers have elsewhere."""

from __future__ import annotations

import time

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.agent import messages
from store_client.agent.messages import Junk

_WHICH_S = 5.0
"""What the tiers have is asked for again so often, at most."""
_MOST = 1000


class Elsewhere:
    """Of which shards of a namespace the tiers have pages, as far as the agent has said."""

    __slots__ = ("asked_s", "namespace", "place", "queued", "shards")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.shards: list[Shard] = []
        self.place = -1
        """The number of the place that it was asked with."""
        self.asked_s = 0.0
        self.queued = False
        """Whether it waits to be sent."""

    def is_due(self, now_s: float) -> bool:
        """Whether to ask, or to ask again."""
        return not self.asked_s or now_s - self.asked_s > _WHICH_S


class Places:
    """Of one client. `elsewhere`, `heard`, `queued` and `wonders` from any thread, the rest from the one that sends."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, int, int, int, int], int] = {}
        """By the namespace's digest and the bounds of the shard."""
        self._last = 0
        self._elsewhere: dict[bytes, Elsewhere] = {}
        """By the namespace's digest."""
        self._unanswered: set[int] = set()
        """Places whose shards the agent is yet to tell."""

    def elsewhere(self, namespace: Namespace) -> Elsewhere:
        known = self._elsewhere.get(namespace.digest)
        if known is None:
            if len(self._elsewhere) >= _MOST:
                self._elsewhere.clear()
            known = self._elsewhere[namespace.digest] = Elsewhere(namespace)
        return known

    @property
    def queued(self) -> int:
        """How many wait to be sent."""
        return sum(known.queued for known in list(self._elsewhere.values()))

    @property
    def wonders(self) -> bool:
        """Whether an answer is yet to come."""
        return bool(self._unanswered)

    def begin(self) -> list[Elsewhere]:
        """A connection begins, on which all of these are to be asked for."""
        self._numbers.clear()
        self._unanswered.clear()
        every = list(self._elsewhere.values())
        for known in every:
            known.asked_s, known.queued = 0.0, False
        return every

    def which(self, known: Elsewhere) -> bytes:
        """The frames that ask for it; none where it is not due."""
        now_s = time.monotonic()
        if not known.is_due(now_s):
            known.queued = False
            return b""
        known.asked_s, known.queued = now_s, False
        namespace = known.namespace
        known.place, place = self.number(namespace, Shard(0, namespace.num_layers, 0, namespace.num_kv_heads))
        self._unanswered.add(known.place)
        return place + messages.frame(messages.Which(known.place))

    def heard(self, told: messages.Shards) -> None:
        """Raises Junk for shards that cannot be."""
        if told.done:
            self._unanswered.discard(told.place)
        try:
            shards = [Shard(*bounds) for bounds in told.shards]
        except ValueError as error:
            raise Junk(str(error)) from None
        for known in list(self._elsewhere.values()):
            if known.place == told.place:
                known.shards = shards

    def number(self, namespace: Namespace, shard: Shard) -> tuple[int, bytes]:
        """The number of a place, and the frame that tells the agent, where it does not know it yet."""
        bounds = (shard.layer_start, shard.layer_stop, shard.head_start, shard.head_stop)
        name = (namespace.digest, *bounds)
        number = self._numbers.get(name)
        if number is not None:
            return number, b""
        if len(self._numbers) >= _MOST:  # numbers are given anew: answers under the old ones are not theirs
            self._numbers.clear()
            for known in list(self._elsewhere.values()):
                known.place = -1
        self._last += 1
        number = self._numbers[name] = self._last % _MOST
        return number, messages.frame(messages.Place(number, namespace.to_dict(), bounds))
