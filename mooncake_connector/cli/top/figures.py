"""What is shown: the latest answers, and from two of them what happens in a second."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mooncake_connector.cli import tables
from mooncake_connector.cli.top.sources import Asking, Look, Said, Series, Sources
from mooncake_connector.metrics.registry import AGES_S
from store_client.base import StoreStats
from store_client.embedded import PoolUser

_KEPT = 240
"""Looks that the line of hit rates and the age of evicted pages reach back."""
_COUNTERS = tuple(
    one.name
    for one in dataclasses.fields(StoreStats)
    if one.name.startswith(("hit_", "missed_", "read_", "stored_", "present_", "evicted_pages", "removed_", "corrupt_"))
)


@dataclass(frozen=True, slots=True)
class Engine:
    """One `--url`. Amounts are per second; a share is None where nothing was counted in between."""

    url: str
    cause: str = ""
    """Why it says nothing; the rest is nothing then."""
    kind: str = ""
    has_connector: bool = True
    """Whether there are figures of ours; else all of pool, transfers and failures is nothing."""
    running: int = 0
    waiting: int = 0
    hit_share: float | None = None
    """Prompt tokens that it did not compute, whatever cache they came from."""
    pool_tokens_s: float = 0.0
    load_nbytes_s: float = 0.0
    save_nbytes_s: float = 0.0
    saved_s_s: float = 0.0
    """Seconds of prefill saved in a second."""
    transports: Mapping[str, float] = field(default_factory=dict)
    """Bytes of KV sent to other instances in a second, by transport."""
    sent_nbytes: Mapping[str, float] = field(default_factory=dict)
    """The same, since the engine was started."""
    failures: Mapping[str, float] = field(default_factory=dict)
    """By cause, since the engine was started."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier behind the pool. Amounts are per second."""

    report: Mapping[str, Any]
    fetched_nbytes_s: float
    written_nbytes_s: float
    hit_share: float | None
    """Of the pages asked for since its agent was started."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything on the screen at one moment."""

    unix_s: float
    pool: str | None
    stats: StoreStats | None
    cause: str
    """Why there is no `stats`."""
    gone_s: float
    """For how long there has been none."""
    span_s: float
    """The seconds that the rates are of; 0 where there is only one look yet."""
    rates: Mapping[str, float]
    """Counters of the pool, per second."""
    hit_shares: Sequence[float | None]
    """Of tokens, from look to look, the latest last; None where nothing was looked up."""
    evicted_within_s: float | None
    """Half of the pages evicted lately had not been used for so long or less; None where none was evicted."""
    users: Sequence[PoolUser] | None
    tiers: Sequence[Tier]
    agent_cause: str
    engines: Sequence[Engine]

    @property
    def transports(self) -> dict[str, tuple[float, float]]:
        """Bytes of KV sent in a second and in all, by transport, over all engines."""
        names = sorted({name for engine in self.engines for name in engine.sent_nbytes})
        return {
            name: (
                sum(engine.transports.get(name, 0.0) for engine in self.engines),
                sum(engine.sent_nbytes.get(name, 0.0) for engine in self.engines),
            )
            for name in names
        }

    @property
    def hit_share(self) -> float | None:
        """Of the tokens between the last two looks."""
        return self.hit_shares[-1] if self.hit_shares else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "unix_s": self.unix_s,
            "pool": None if self.stats is None else tables.plain(self.stats),
            "cause": self.cause,
            "span_s": self.span_s,
            "per_second": dict(self.rates),
            "hit_share": self.hit_share,
            "evicted_within_s": self.evicted_within_s if self.evicted_within_s != math.inf else None,
            "users": tables.users_json(self.users),
            "tiers": [
                {
                    **one.report,
                    "fetched_nbytes_s": one.fetched_nbytes_s,
                    "written_nbytes_s": one.written_nbytes_s,
                    "hit_share": one.hit_share,
                }
                for one in self.tiers
            ],
            "engines": [dataclasses.asdict(one) for one in self.engines],
            "transports": {
                name: {"nbytes_s": nbytes_s, "nbytes": nbytes} for name, (nbytes_s, nbytes) in self.transports.items()
            },
        }


class Figures:
    """Makes what is shown of what sources say, and remembers the pool's looks for that."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._looks: deque[Said[Look]] = deque(maxlen=_KEPT)
        self._there_s = time.monotonic()

    def now(self) -> Shown:
        """To be asked at least as often as the pool is."""
        sources = self._sources
        latest = None if sources.looks is None else sources.looks.latest
        if latest is not None and latest.value is not None:
            self._there_s = time.monotonic()
            if not self._looks or self._looks[-1].at_s != latest.at_s:
                self._take(latest)
        there = None if latest is None else latest.value
        looks = self._looks if there is not None else ()
        steps = list(_steps(looks))
        users = None if sources.users is None or sources.users.latest is None else sources.users.latest.value
        agent = None if sources.agent is None else sources.agent.latest
        return Shown(
            unix_s=time.time(),
            pool=None if sources.pool is None else str(sources.pool),
            stats=None if there is None else there[1],
            cause=sources.no_pool if latest is None else latest.cause,
            gone_s=time.monotonic() - self._there_s,
            span_s=steps[-1][0] if steps else 0.0,
            rates=_rates(*steps[-1]) if steps else {},
            hit_shares=[_hit_share(former, later) for _, former, later in steps],
            evicted_within_s=_evicted_within_s(steps),
            users=users,
            tiers=[] if sources.agent is None else list(_tiers(sources.agent)),
            agent_cause="" if agent is None else agent.cause,
            engines=[_engine(url, asking) for url, asking in sources.engines.items()],
        )

    def _take(self, said: Said[Look]) -> None:
        """Another pool, in the place of the one before, begins to count anew."""
        if self._looks and self._looks[-1].value and said.value and self._looks[-1].value[0] != said.value[0]:
            self._looks.clear()
        self._looks.append(said)


Step = tuple[float, StoreStats, StoreStats]
"""Seconds between two looks, the former and the later one."""


def _steps(looks: Sequence[Said[Look]] | deque[Said[Look]]) -> Iterator[Step]:
    for former, later in itertools.pairwise(looks):
        if former.value is not None and later.value is not None:
            yield max(later.at_s - former.at_s, 1e-6), former.value[1], later.value[1]


def _rates(span_s: float, former: StoreStats, later: StoreStats) -> dict[str, float]:
    return {name: (getattr(later, name) - getattr(former, name)) / span_s for name in _COUNTERS}


def _hit_share(former: StoreStats, later: StoreStats) -> float | None:
    hit, missed = later.hit_tokens - former.hit_tokens, later.missed_tokens - former.missed_tokens
    return hit / (hit + missed) if hit + missed > 0 else None


def _evicted_within_s(steps: Sequence[Step]) -> float | None:
    """The upper bound that half of the pages evicted during these steps do not exceed; infinite beyond the last."""
    if not steps:
        return None
    counts = [b - a for a, b in zip(steps[0][1].evicted_ages, steps[-1][2].evicted_ages, strict=False)]
    if sum(counts) <= 0:
        return None
    within = list(itertools.accumulate(counts))
    place = next(number for number, count in enumerate(within) if 2 * count >= within[-1])
    return AGES_S[place] if place < len(AGES_S) else math.inf


def _tiers(asking: Asking[dict[str, Any] | None]) -> Iterator[Tier]:
    former, latest = asking.last_two
    if latest is None or latest.value is None:
        return
    before = former.value if former is not None and former.value is not None else {}
    same = before.get("pid") == latest.value.get("pid")
    known = {tier["title"]: tier for tier in before.get("tiers", ())} if same else {}
    span_s = latest.at_s - former.at_s if former is not None else 1.0
    for tier in latest.value.get("tiers", ()):
        old = known.get(tier["title"], tier)
        fetched, written = (
            max(0.0, tier.get(name, 0) - old.get(name, 0)) / max(span_s, 1e-6)
            for name in ("fetched_nbytes", "written_nbytes")
        )
        asked = tier.get("asked_pages", 0)
        yield Tier(tier, fetched, written, tier.get("hit_pages", 0) / asked if asked else None)


def _engine(url: str, asking: Asking[Series]) -> Engine:
    former, latest = asking.last_two
    if latest is None or latest.value is None:
        return Engine(url, cause="not asked yet" if latest is None else latest.cause)
    now = latest.value
    before, span_s = (now, 1.0) if former is None or former.value is None else (former.value, latest.at_s - former.at_s)

    def added(name: str, label: str | None = None) -> float:
        """In a second; an engine that was started again begins at 0."""
        there, was = (sum(_of(series, name, label).values()) for series in (now, before))
        return (there if there < was else there - was) / max(span_s, 1e-6)

    def added_by(name: str) -> dict[str, float]:
        return {label: added(name, label) for label in now.get(name, {})}

    def count(name: str) -> int:
        return int(sum(now.get(name, {}).values()))

    is_vllm = any(name.startswith("vllm:") for name in now)
    kind = "vLLM" if is_vllm else "SGLang" if any(name.startswith("sglang:") for name in now) else ""
    if is_vllm:
        hits = added("vllm:prefix_cache_hits_total") + added("vllm:external_prefix_cache_hits_total")
        asked = added("vllm:prefix_cache_queries_total")
    else:
        hits, asked = added("sglang:cached_tokens_total"), added("sglang:prompt_tokens_total")
    ours = "mooncake_connector_"
    return Engine(
        url,
        kind=kind,
        has_connector=any(name.startswith(ours) for name in now),
        running=count("vllm:num_requests_running" if is_vllm else "sglang:num_running_reqs"),
        waiting=count("vllm:num_requests_waiting" if is_vllm else "sglang:num_queue_reqs"),
        hit_share=min(1.0, hits / asked) if asked > 0 else None,
        pool_tokens_s=added(f"{ours}hit_tokens_total"),
        load_nbytes_s=added(f"{ours}load_bytes_total") + added(f"{ours}bytes_total", "load"),
        save_nbytes_s=added(f"{ours}save_bytes_total") + added(f"{ours}bytes_total", "save"),
        saved_s_s=added(f"{ours}prefill_seconds_saved_total"),
        transports=added_by(f"{ours}transport_bytes_total"),
        sent_nbytes=dict(now.get(f"{ours}transport_bytes_total", {})),
        failures={cause: number for cause, number in now.get(f"{ours}failures_total", {}).items() if number},
    )


def _of(series: Series, name: str, label: str | None) -> Mapping[str, float]:
    values = series.get(name, {})
    return values if label is None else {label: values.get(label, 0.0)}
