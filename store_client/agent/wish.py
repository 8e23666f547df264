"""What is asked of the agent, and what it says to that: plain values between its socket and what fetches pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from store_client.tiers.base import SpaceName


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Pages that the pool lacks and somebody is about to read: consecutive ones of a chain."""

    namespace: Namespace
    """All of it, not the digest alone: a pool that never had pages of it writes down what it is."""
    shard: Shard
    keys: Sequence[bytes]
    """Page keys, 32 bytes each, in the order of the chain; at least one."""
    parent: bytes | None
    """The key before `keys[0]`, where it is known."""
    nbytes: int
    """Of each page."""
    deadline_s: float
    """Seconds from now; what comes later is of no use to who asks."""
    prefill_tokens_s: float | None = None
    """How fast the engine that asks computes a prompt; None where that is not known yet."""

    @property
    def space(self) -> SpaceName:
        return SpaceName(self.namespace.digest, self.shard)

    @property
    def page_tokens(self) -> int:
        return self.namespace.page_tokens


@dataclass(frozen=True, slots=True)
class Word:
    """How a wish stands."""

    coming: int = 0
    """So many leading keys of the wish are being fetched, or have landed."""
    landed: int = 0
    """So many leading keys are in the pool."""
    done: bool = False
    """Nothing more will come; the last word of every wish."""
    cause: str = ""
    """Why not all of it came: one word for the metrics ("absent", "slow", "timeout", "unavailable", ...)."""
    settled: bool = False
    """No tier is being asked any more whether it has the next ones: `coming` hardly grows from now on."""


class Fetch(Protocol):
    """A wish that is being looked after."""

    def cancel(self) -> None:
        """Nobody waits for it any more, and nothing more is told. Returns at once."""


class Fetches(Protocol):
    """What looks after wishes, as the agent's server sees it (`flow.Flow`)."""

    def ask(self, wish: Wish, tell: Callable[[Word], None]) -> Fetch:
        """Returns at once; `tell` is called from any thread, any number of times, at last with `done`."""

    def seek(
        self, space: SpaceName, keys: Sequence[bytes], nbytes: int, tell: Callable[[Sequence[bool], bool], None]
    ) -> None:
        """Which of these pages, of `nbytes` each, the tiers have. Returns at once; `tell` is called from any thread
        with what is known of each key, at last with True."""

    def shards(self, namespace: Namespace, tell: Callable[[Sequence[Shard], bool], None]) -> None:
        """Which shards of a namespace the tiers have. Returns at once; `tell` is called with what is known by then, and
        from any thread when more is, at last with True."""

    def holds(
        self, namespace: Namespace, shard: Shard, keys: Sequence[bytes], nbytes: int, allowed_s: float
    ) -> Sequence[tuple[str, Future[list[bool] | None]]]:
        """Which of these pages each tier seems to have, by the tier's kind; nothing is fetched. Returns at once. None
        where a tier does not say within `allowed_s`."""

    def clear(self, namespace: bytes | None, done: set[str]) -> Any:
        """Forget the pages of a namespace, or all, in the tiers, but for those whose title is in `done`; adds those
        that have done it. Once it returns or raises no fetch from before publishes any more. Waits for the tiers;
        raises TierError where one could not do it."""

    def stats(self) -> Sequence[Any]:
        """For each tier a dataclass with its counters."""

    def close(self) -> None:
        """Ends all fetches and threads, within some seconds."""
