"""What became of one request's prompt: tokens that the pool had, and by reason those that it did not.

Every token beyond vLLM's own hit is in one place of it, and it is entered into the figures as a whole, once a request:
when nothing is to be loaded at once, or when the load has ended. So hits and misses always add up to what was queried.
A request that ends before that counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from store_client.fate import Fate
from store_client.missing import why_missing
from vllm_plugin.messages import Timing, WorkerReport
from vllm_plugin.prefix.kept import Keeper

if TYPE_CHECKING:
    from mooncake_connector.prefill_speed import PrefillSpeed
    from vllm_plugin.prefix.tracked import Offer, Tracked
    from vllm_plugin.stats import ConnectorStats


@dataclass(slots=True)
class Account:
    """Tokens of a prompt.

    Args:
        prompt_tokens: all of them.
        local_tokens: in vLLM's own cache, so that nobody asked the pool for them.
        hit_tokens: that a load brings, or brought.
        missed: the others, by reason.
        first: the reason of the first page that was missing; None where nothing was.
        timing: of the load and the transfer, as far as workers have said.
    """

    prompt_tokens: int
    local_tokens: int
    hit_tokens: int
    missed: Counter[Miss] = field(default_factory=Counter)
    first: Miss | None = None
    timing: Timing = field(default_factory=Timing)

    def miss(self, why: Miss, tokens: int) -> None:
        if tokens > 0:
            self.missed[why] += tokens
            self.first = self.first or why

    def lose(self, why: Miss, kept: int) -> None:
        """Of what was to be loaded only that before the token `kept` came."""
        came = min(max(0, kept - self.local_tokens), self.hit_tokens)
        lost, self.hit_tokens = self.hit_tokens - came, came
        if lost:
            self.missed[why] += lost
            self.first = why

    def enter(self, stats: ConnectorStats) -> None:
        """Count it; called once."""
        stats.add("queried_tokens", self.prompt_tokens - self.local_tokens)
        if self.hit_tokens:
            stats.add("hit_tokens", self.hit_tokens)
        for why, tokens in self.missed.items():
            stats.missed(why, tokens)

    def line(self, req_id: str, *, lookup_s: float, tier: str) -> RequestLine:
        timing = self.timing
        return RequestLine(
            id=req_id, prompt_tokens=self.prompt_tokens, local_tokens=self.local_tokens, hit_tokens=self.hit_tokens,
            fetched_tokens=timing.fetched_tokens, lookup_s=lookup_s, load_s=timing.load_s, transfer_s=timing.transfer_s,
            transport=timing.transport, tier=tier, miss=self.first,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Unsaid:
    """What the log is told of a request when its KV has been sent."""

    account: Account
    tracked: Tracked
    tier: str


class Accounts:
    """Opens and closes the account of each request; `stats` takes what is counted, `speed` says what hits save, and
    `keeper` has the line of each request, where there is one."""

    def __init__(self, config: Config, stats: ConnectorStats, speed: PrefillSpeed, keeper: Keeper) -> None:
        self._page_tokens, self._min_hit_tokens = int(config.page_tokens), config.effective_min_hit_tokens
        self._counts, self._logs = config.prefix_reuse, config.log_requests
        self._tiers = "+".join(tier.kind for tier in config.tiers)
        self._stats, self._speed, self._keeper = stats, speed, keeper
        self._unsaid: dict[str, _Unsaid] = {}

    @contained(nothing)
    def open(
        self,
        tracked: Tracked,
        offer: Offer | None,
        num_from_pool: int,
        num_elsewhere: int,
        fate: Callable[[int], Fate | None],
    ) -> None:
        """The blocks of a request were allocated; where nothing is to come, that was all.

        Args:
            offer: of the last lookup; None where the pool was not asked.
            num_from_pool: tokens beyond the local hit that are loaded.
            num_elsewhere: tokens behind those that another instance brings.
            fate: what became of the page of this number, which is asked for one page at most.
        """
        if tracked.counted:
            return
        tracked.counted = True
        tracked.account = self._account(tracked, offer, num_from_pool, num_elsewhere, fate)
        if not num_from_pool + num_elsewhere:
            self.close(tracked)

    def _account(
        self,
        tracked: Tracked,
        offer: Offer | None,
        num_from_pool: int,
        num_elsewhere: int,
        fate: Callable[[int], Fate | None],
    ) -> Account:
        request, at = tracked.request, tracked.local_tokens + num_from_pool
        account = Account(request.num_prompt_tokens, tracked.local_tokens, num_from_pool)
        end = request.num_prompt_tokens // self._page_tokens * self._page_tokens
        account.miss(Miss.ELSEWHERE, num_elsewhere)
        at += num_elsewhere
        if offer is None:
            account.miss(tracked.unasked or Miss.UNAVAILABLE, end - at)
        elif request.get_skip_reading_prefix_cache():
            account.miss(Miss.NOT_CACHED, end - at)
        else:
            offered = tracked.local_tokens + offer.tokens
            account.miss(Miss.BELOW_MIN_HIT if offer.tokens < self._min_hit_tokens else Miss.ELSEWHERE, offered - at)
            at = max(at, offered)
            if at < end:
                account.miss(offer.why or self._remembered(fate(at // self._page_tokens)), end - at)
        account.miss(Miss.SHORT, request.num_prompt_tokens - max(at, end))
        return account

    def _remembered(self, fate: Fate | None) -> Miss:
        """Why the pool lacks a page; of one that was evicted also how long it would have had to stay."""
        why = why_missing(fate)
        if fate is not None and why is Miss.EVICTED:
            self._stats.add("evicted_requests")
            self._stats.add("evicted_unused_seconds", fate.unused_s)
            self._stats.add("evicted_reuse_seconds", fate.unused_s + fate.ago_s)
        return why

    @contained(nothing)
    def reported(self, report: WorkerReport, tracked: Mapping[str, Tracked]) -> None:
        """What workers say of loads and transfers that ended."""
        for req_id, timing in report.timings.items():
            account = self._unsaid[req_id].account if req_id in self._unsaid else None
            if req_id in tracked:
                account = tracked[req_id].account or account
            if account is not None:
                account.timing = account.timing.merge(timing)
        for req_id, kept in report.failed_loads.items():
            if req_id in tracked and (account := tracked[req_id].account) is not None:
                account.lose(Miss.LATE if req_id in report.late else Miss.LOAD_FAILED, kept)

    @contained(nothing)
    def close(self, tracked: Tracked) -> None:
        """Nothing more comes: enter it into the figures, and into the log where that is asked for."""
        account, tracked.account = tracked.account, None
        if account is None:
            return
        brought = 0  # by tiers: the pool did not have it when the request arrived
        if tracked.known_pages is not None:
            stop = account.local_tokens + account.hit_tokens
            brought = max(0, stop - max(account.local_tokens, tracked.known_pages * self._page_tokens))
        if self._counts:
            account.enter(self._stats)
            if account.hit_tokens and self._speed.tokens_s:
                self._stats.add("prefill_seconds_saved", account.hit_tokens / self._speed.tokens_s)
            if brought:
                self._stats.add("tier_hit_tokens", brought)
        if self._logs:
            self._unsaid[tracked.request.request_id] = _Unsaid(account, tracked, self._tiers if brought else "")
            if not tracked.gives_away:
                self.say(tracked.request.request_id)

    @contained(nothing)
    def say(self, req_id: str) -> None:
        """Write the line of a request that was closed, if there is one that waits: its KV has been sent, or is not."""
        unsaid = self._unsaid.pop(req_id, None)
        if unsaid is not None:
            line = unsaid.account.line(req_id, lookup_s=unsaid.tracked.lookup_s, tier=unsaid.tier)
            line.log()
            self._keeper.keep(line, unsaid.tracked, unsaid.account.missed)
