"""`Flow`: pages between the pool of a host and its tiers, both ways. What the agent's server talks to.

Fetches what is asked for (`fetch`), gives tiers what the pool got (`spread`), and knows how each tier does (`source`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from mooncake_connector.config.tiers import TierSettings
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.log import get_logger, log_once
from store_client.agent.chain import Chain
from store_client.agent.fetch import Fetcher
from store_client.agent.looks import Holding, look
from store_client.agent.report import TierReport
from store_client.agent.seeking import Seeking
from store_client.agent.source import Source
from store_client.agent.splits import Splits
from store_client.agent.spread import Spread
from store_client.agent.wish import Wish, Word
from store_client.embedded import EmbeddedStore
from store_client.tiers.base import SpaceName, Tier, TierError

logger = get_logger(__name__)

_CLOSE_S = 2.0
_CLEAR_S = 60.0


class Ask:
    """A wish that is being looked after."""

    def __init__(self, fetcher: Fetcher, chain: Chain) -> None:
        self._fetcher, self._chain = fetcher, chain

    def cancel(self) -> None:
        """Nobody waits for it any more. What nobody else wants either is not fetched. Returns at once."""
        self._fetcher.cancel(self._chain)


class Flow:
    """Args:
    pool: open, and open until after `close`.
    tiers: nearest first.
    secret: the deployment's, for seals of tiers that others may write to; empty where there is none.
    """

    def __init__(self, pool: EmbeddedStore, tiers: Sequence[tuple[TierSettings, Tier]], secret: bytes) -> None:
        self._sources = [Source(settings, tier, secret) for settings, tier in tiers]
        self._closed = threading.Event()
        self._register(pool)
        self._fetcher = Fetcher(pool, self._sources)
        self._splits = Splits(self._sources)
        self._seeking = Seeking(self._sources)
        for source in self._sources:
            Spread(pool, source, self._closed).start()

    def _register(self, pool: EmbeddedStore) -> None:
        memory = pool.memory
        if memory is None:
            return
        for source in self._sources:
            try:
                source.tier.register(memory)
            except TierError as error:
                source.failed(source.reads, error.cause, lasting=error.lasting)
                logger.warning("tier %s: %s", source.title, error)

    def ask(self, wish: Wish, tell: Callable[[Word], None]) -> Ask:
        """Have pages fetched; returns at once. `tell` is called from threads of the flow, once at a time and in order,
        whenever more is known, and at last with `done`; not after `cancel`, but for a call that is under way."""
        return Ask(self._fetcher, self._fetcher.ask(wish, tell))

    def seek(
        self, space: SpaceName, keys: Sequence[bytes], nbytes: int, tell: Callable[[Sequence[bool], bool], None]
    ) -> None:
        """As `Fetches.seek`."""
        self._seeking.ask(space, keys, nbytes, tell)

    def shards(self, namespace: Namespace, tell: Callable[[Sequence[Shard], bool], None]) -> None:
        """As `Fetches.shards`."""
        self._splits.ask(namespace, tell)

    def holds(
        self, namespace: Namespace, shard: Shard, keys: Sequence[bytes], nbytes: int, allowed_s: float
    ) -> list[tuple[str, Holding]]:
        """As `Fetches.holds`."""
        space = SpaceName(namespace.digest, shard)
        usable = [source for source in self._sources if source.usable() and not namespace.is_private]
        return [(source.settings.kind, look(source, space, keys, nbytes, allowed_s)) for source in usable]

    def stats(self) -> list[TierReport]:
        """How each tier does, in their order."""
        queued = self._fetcher.queued_pages()
        return [source.report(pages) for source, pages in zip(self._sources, queued, strict=True)]

    def clear(self, namespace: bytes | None, done: set[str]) -> int:
        """Forget a namespace, or all of them, in the tiers; returns the pages there were, as far as tiers know.

        Tiers whose title is in `done` are left out, and those that have done it are added. Once it returns or raises,
        nothing that was asked for before is published any more. Raises TierError where a tier could not do it, after
        all were asked.
        """
        self._fetcher.forget(namespace)
        removed, failed = 0, None
        for source in self._sources:
            if source.title in done:
                continue
            try:
                removed += source.tier.clear(namespace, deadline_s=_CLEAR_S)
                done.add(source.title)
            except TierError as error:
                source.tally.failed(error.cause)
                failed = failed or TierError(f"tier {source.title}: {error}", error.cause, lasting=error.lasting)
        if failed is not None:
            raise failed
        return removed

    def close(self) -> None:
        """End all wishes ("closed") and threads, and close the tiers, but for those of which a call does not come back.
        Takes seconds at most."""
        if self._closed.is_set():
            return
        self._closed.set()
        idle = self._fetcher.close(time.monotonic() + _CLOSE_S)
        for source, is_idle in zip(self._sources, idle, strict=True):
            if is_idle:
                close_tier(source.title, source.tier)
            else:
                logger.warning("tier %s is not closed: a call of it did not come back", source.title)


def close_tier(title: str, tier: Tier) -> None:
    """Close it; one that fails at that keeps no other from being closed."""
    try:
        tier.close()
    except Exception as error:
        log_once(f"tier.{title}.close", "tier %s was not closed in order: %r", title, error, logger=logger)
