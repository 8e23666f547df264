"""What the pool says of the pages of a request, and for how long each answer is good or waited for.

Lookups are part of vLLM's scheduler step: they read memory and do not wait. Where pages are missing that a tier may
have, the pool answers what it has heard so far and is asked again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping

from mooncake_connector.config.schema import Config
from mooncake_connector.log import get_logger, log_once
from mooncake_connector.misses import Miss
from store_client.base import Lookup
from store_client.sharded import ShardView
from vllm_plugin.prefix.groups_hit import GroupsHit
from vllm_plugin.prefix.groups_lookup import Agreed, GroupsLookup, Views
from vllm_plugin.prefix.tracked import Offer, Tracked
from vllm_plugin.stats import ConnectorStats

_LOOKUP_REUSE_S = 0.05
"""A request that waits for blocks is asked about every step; its last lookup serves for so long."""
_PENDING_REUSE_S = 0.001
"""Likewise where the answer is pending: with nothing to compute vLLM asks about every millisecond."""
_LOOKUP_HANGS_S = 1.0
"""A lookup only reads memory. After one that took so long the pool is left alone, since the engine stood still."""
_STALL_PAUSE_S = 30.0
"""After a load that was given up at its deadline the pool is not offered for so long: each further one would wait as
long for nothing."""
_NOT_LANDED_PAUSE_S = 30.0
"""After a load that waited in vain for pages that were said to be coming, none is promised for so long."""

logger = get_logger(__name__)


class Lookups:
    """See the module; `stats` takes what is counted, `groups` decides for models with several of them."""

    def __init__(self, config: Config, stats: ConnectorStats, groups: GroupsHit | None) -> None:
        self._page_tokens = int(config.page_tokens)
        self._groups = None if groups is None else GroupsLookup(groups, self._page_tokens, self.leading)
        self._wait_s, self._tiered = config.lookup_wait_s, bool(config.tiers)
        self._stats = stats
        self._stalled_until_s = 0.0
        self._unpromised_until_s = 0.0

    @property
    def stalled(self) -> bool:
        """Whether the pool is left alone for now."""
        return time.monotonic() < self._stalled_until_s

    def offer(
        self, tracked: Tracked, former: Offer | None, num_local_tokens: int, views: Views,
        *, fetch: bool, tokens_s: float | None = None,
    ) -> Offer:  # fmt: skip
        """What the pool has of a prompt beyond vLLM's own hit; the `former` answer, while it is good.

        Where not `fetch` no tier is asked, and only what is there counts.

        Args:
            views: what the ranks see of the group at a position, or (None) of all groups of full attention.
            tokens_s: how many tokens would be computed in a second; None where that is not known.
        """
        now_s = time.monotonic()
        if former is not None and former.local_tokens == num_local_tokens and now_s <= former.good_until_s:
            return former
        tracked.junctions.clear()  # that of a former lookup was as far as a request had got that has gone on since
        page_tokens = self._page_tokens
        first = num_local_tokens // page_tokens
        keys = tracked.page_keys(tracked.request.num_prompt_tokens // page_tokens, page_tokens)
        found, why = self._found(keys[first:], views(None), fetch)
        unpromised = now_s < self._unpromised_until_s
        if unpromised:  # what lands meanwhile counts
            why = Miss.LATE if found.coming else why
            found = Lookup(found.pages, found.pending and not found.coming, wait_s=found.wait_s, unheard=found.unheard)
        coming: Mapping[int, int] = {0: found.coming}
        unheard = found.unheard
        if self._groups is not None and found.pages + found.coming:
            asks = fetch and self._tiered and not unpromised
            agreed = self._agreed(tracked, first, found, views, fetch=asks, tokens_s=tokens_s)
            if less := self._why_less(first, found, agreed):
                why, unheard = less, agreed.unheard
            found, coming = agreed.lookup, agreed.coming
        asked_s, now_s = now_s, time.monotonic()
        if tracked.aside_since_s is None:  # else it is part of the wait
            tracked.lookup_s += now_s - asked_s
        if now_s - asked_s > _LOOKUP_HANGS_S:
            self._stalled_until_s = now_s + _STALL_PAUSE_S
            self._stats.fail("lookup_hung")
            said = "a lookup took %.1f s: no prefix reuse for %d s"
            log_once("lookup.hung", said, now_s - asked_s, _STALL_PAUSE_S, logger=logger)
        tokens = max((first + found.pages + found.coming) * page_tokens - num_local_tokens, 0)
        reuse_s = _PENDING_REUSE_S if found.pending else _LOOKUP_REUSE_S
        unheard = unheard or found.pending
        why = Miss.LATE if unheard else why
        return Offer(num_local_tokens, tokens, coming, found.pending, found.wait_s, now_s + reuse_s, why, unheard)

    def _found(self, keys: list[bytes], views: list[ShardView], fetch: bool) -> tuple[Lookup, Miss | None]:
        """The leading pages of full attention, and why no more where that is no page's own fate."""
        try:
            return self._leading(keys, views, fetch), None
        except Exception as error:
            self._fail(error)
            return Lookup(0), Miss.UNAVAILABLE

    @staticmethod
    def _why_less(first: int, found: Lookup, agreed: Agreed) -> Miss | None:
        """Why other groups take less than full attention has: a prompt's last token is computed in any case."""
        end = agreed.lookup.pages + agreed.lookup.coming
        if end >= found.pages + found.coming:
            return None
        return Miss.GROUPS_DISAGREE if agreed.most > first + end else Miss.SHORT

    def _agreed(
        self, tracked: Tracked, first: int, found: Lookup, views: Views, *, fetch: bool, tokens_s: float | None
    ) -> Agreed:
        """How much of what full attention has, from the first page on, the other groups can go on from."""
        assert self._groups is not None
        try:
            agreed = self._groups.agreed(
                tracked.keys, tracked.request.num_tokens, first, found, views, fetch=fetch, tokens_s=tokens_s
            )
        except Exception as error:
            self._fail(error)
            return Agreed(Lookup(0))
        if agreed.most > first + agreed.lookup.pages + agreed.lookup.coming:
            tracked.junctions.add(agreed.most * self._page_tokens)
        return agreed

    def leading(self, keys: list[bytes], views: list[ShardView], fetch: bool = True) -> Lookup:
        """The leading pages that all ranks have or will have: more may come where they may for each that has no more.

        Where not `fetch`, only those that are there.
        """
        try:
            return self._leading(keys, views, fetch)
        except Exception as error:
            self._fail(error)
            return Lookup(0)

    @staticmethod
    def _leading(keys: list[bytes], views: list[ShardView], fetch: bool) -> Lookup:
        if not fetch:
            return Lookup(min(sum(itertools.takewhile(bool, view.contains(keys))) for view in views))
        found = [view.lookup(keys) for view in views]
        pages = min(one.pages for one in found)
        stop = min(len(keys), *(one.pages + one.coming for one in found))
        ends = [one for one in found if one.pages + one.coming == stop]
        wait_s = min((one.wait_s for one in ends), default=math.inf)
        pending, unheard = all(one.pending for one in ends), any(one.unheard for one in ends)
        return Lookup(pages, pending, max(stop - pages, 0), wait_s, unheard)

    def _fail(self, error: Exception) -> None:
        self._stats.fail("lookup")
        log_once("lookup", "a lookup failed: %r", error, logger=logger, exc_info=True)

    def is_worth_a_wait(self, tracked: Tracked, offer: Offer, step_s: float) -> bool:
        """Whether a request waits for the rest of an answer; pages that are known to come are no reason.

        `step_s`: what the step is expected to take that the others get meanwhile; 0 where there are none.
        """
        waits = max(step_s, _PENDING_REUSE_S) <= offer.wait_s and self._waits(tracked, offer)
        if not waits and tracked.aside_since_s is not None:
            aside_s = time.monotonic() - tracked.aside_since_s
            tracked.lookup_s += aside_s
            self._stats.add("tier_wait_seconds", aside_s)
            tracked.aside_since_s = None
        return waits

    def _waits(self, tracked: Tracked, offer: Offer) -> bool:
        if not offer.pending or not self._wait_s:
            return False
        now_s = time.monotonic()
        if tracked.patient_until_s is None:
            tracked.patient_until_s = now_s + self._wait_s
        if now_s < tracked.patient_until_s:
            if tracked.aside_since_s is None:
                tracked.aside_since_s = now_s
                self._stats.add("tier_waits")
            return True
        if tracked.patient_until_s:
            tracked.patient_until_s = 0.0
            self._stats.fail("lookup_late")
            said = "the pool did not say within %g s whether it has the rest of a prompt: what is not there is computed"
            log_once("lookup.late", said, self._wait_s, logger=logger)
        return False

    def loads_failed(self, *, stalled: bool, not_landed: bool) -> None:
        """The workers gave loads up: since the pool or a device is in no order, or since coming pages did not come."""
        if stalled:
            self._stalled_until_s = time.monotonic() + _STALL_PAUSE_S
        if not_landed:
            self._unpromised_until_s = time.monotonic() + _NOT_LANDED_PAUSE_S
