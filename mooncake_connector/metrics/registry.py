"""Every metric by name: those of both engines, the pool and its tiers are made from here, and docs/metrics.md is, too.

A new one is a line here, and a call with its figure where it is counted. Names follow Prometheus: base units, `_total`
behind counters. All begin with `mooncake_connector_`; in vLLM with `vllm:mooncake_connector_`, since vLLM takes from a
process that starts a second engine only metrics whose names begin so, and a name registered twice ends that engine.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "mooncake_connector_"
VLLM_PREFIX = f"vllm:{PREFIX}"

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds of what a load, a save or a transfer takes."""
AGES_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0, 604800.0)
"""Upper bounds of how long a page was not used: from seconds, where the pool is far too small, to a week. Pools hold
counts by them, so other bounds are another format of the pool."""


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        name: without prefix, and of a counter without `_total`.
        text: what it says, one sentence without its full stop.
        labels: of its own; vLLM's metrics have vLLM's labels beside them.
        of: what the figure is called where it is counted, if not as here: a field of `StoreStats` or `TierReport`, or a
            key of vLLM's statistics.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    of: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def figure(self) -> str:
        return self.of or self.name

    def series(self, prefix: str = PREFIX) -> str:
        """As Prometheus and a query have it."""
        return f"{prefix}{self.name}" + ("_total" if self.kind is Kind.COUNTER else "")


def _counter(name: str, text: str, *labels: str, of: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, text, labels, of)


def _gauge(name: str, text: str, *labels: str, of: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, text, labels, of)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str, of: str = "") -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, labels, of, buckets)


LOAD_DURATION = _histogram("load_duration_seconds", "Seconds from the submission of a load to its end", SECONDS)
SAVE_DURATION = _histogram("save_duration_seconds", "Seconds from the submission of a save to its end", SECONDS)
FETCH_DURATION = _histogram(
    "fetch_duration_seconds", "Seconds from the announcement of a transfer to its end, prefill included", SECONDS
)
MISS_TOKENS = _counter(
    "miss_tokens",
    "Prompt tokens that did not come from the pool, by reason: that of the first page of a prompt that was missing",
    "reason",
)
EVICTED = (
    _counter("evicted_requests", "Requests whose first missing page had been evicted"),
    _counter("evicted_unused_seconds", "Seconds for which these pages had not been used when they were evicted"),
    _counter(
        "evicted_reuse_seconds",
        "Seconds from the last use of these pages to the request: over evicted_requests, for how long a pool would "
        "have to keep them",
    ),
)

PREFILL_SECONDS_SAVED = _counter(
    "prefill_seconds_saved",
    "Seconds that computing hit_tokens would have taken: each hit's tokens over the prefill speed that this engine "
    "had measured of itself by then (about the last ten steps of prefill). Hits before the first such step count "
    "as none, and what loading took is not subtracted",
)

TLS_PROCESS_ENDS = _counter(
    "tls_process_ends", "Times that the process that does TLS ended by itself, and what went over TLS with it", "how"
)

TRANSPORTS_LEFT_OUT = _counter(
    "transports_left_out",
    "Times that a process of this instance did not offer a transport that it was to: which one, what is missing, and "
    "how to get it",
    "why",
)

RAILS = (
    _counter("rail_bytes", "Bytes of KV that peers read over each port of an RDMA card of this host", "rail"),
    _counter("rail_direct_bytes", "Of rail_bytes, those that came straight from GPU memory (GPUDirect)", "rail"),
    _counter(
        "rail_opened",
        "Times that this instance's processes opened a port of an RDMA card: which one, its address, its link and its "
        "limits, as `doctor rdma` says; the library, the limit of locked memory, and how memory of a GPU is reached",
        "port",
    ),
    _counter("rail_failures", "Times that such a rail to a peer broke; what was under way went over others", "rail"),
    _counter("rail_recoveries", "Times that such a rail worked again, and was taken back", "rail"),
)

ENGINE_INFO = _gauge(
    "engine_info",
    "Always 1: the dtype that the engine computes in, which is that of its KV where --kv-cache-dtype is auto, and "
    "page_tokens where it was set",
    "dtype", "page_tokens",
)  # fmt: skip

VLLM = (
    ENGINE_INFO,
    _counter("hit_tokens", "Prompt tokens that were loaded from the pool instead of computed, each request once"),
    _counter("tier_hit_tokens", "Of hit_tokens, those that tiers brought after the request had arrived"),
    _counter("tier_promised_pages", "Pages that tiers were bringing when a load was planned, by each rank"),
    _counter("tier_landed_pages", "Of tier_promised_pages, those that came and were loaded"),
    _counter("tier_lost_pages", "Of tier_promised_pages, those that did not come in time and were computed"),
    _counter("tier_waits", "Requests that waited until tiers had said which of their pages they have"),
    _counter("tier_wait_seconds", "Seconds for which requests waited for that"),
    _counter("tier_unheard", "Requests that were planned before tiers had said so"),
    _counter(
        "queried_tokens",
        "Prompt tokens beyond the local prefix cache, each request once: all hit_tokens and all miss_tokens",
    ),
    MISS_TOKENS,
    *EVICTED,
    PREFILL_SECONDS_SAVED,
    _counter("load_bytes", "Bytes loaded from the pool into KV blocks"),
    _counter("load_seconds", "Seconds from the submission of a load to its end"),
    _counter("loads", "Loads that ended, well or not"),
    LOAD_DURATION,
    _counter("save_bytes", "Bytes stored in the pool"),
    _counter("save_seconds", "Seconds from the submission of a save to its end"),
    _counter("saves", "Saves that ended, well or not"),
    SAVE_DURATION,
    _counter("saved_pages", "Pages newly stored in the pool"),
    _counter("overtaken_pages", "Pages that were not stored, since vLLM used their blocks for another request first"),
    _counter("fetched_tokens", "Prompt tokens that a prefill instance computed for this one"),
    _counter("fetch_bytes", "Bytes of KV that arrived from prefill instances"),
    _counter("fetch_seconds", "Seconds from the announcement of a transfer to its end"),
    _counter("fetches", "Transfers from prefill instances that ended, well or not"),
    FETCH_DURATION,
    _counter("send_bytes", "Bytes of KV that were sent to decode instances"),
    _counter("send_seconds", "Seconds from the beginning of a request that is given away to its release"),
    _counter("sends", "Transfers to decode instances that ended, well or not"),
    _counter(
        "failures",
        "Loads, saves and transfers that failed, and what the agent did not do, by cause; each was answered by "
        "recomputation",
        "cause",
    ),
    _counter(
        "transport_bytes", "Bytes of KV that were sent to decode instances, by transport", "transport", of="transports"
    ),
    TRANSPORTS_LEFT_OUT,
    *RAILS,
    TLS_PROCESS_ENDS,
)
"""Of a vLLM instance, over its workers. Those that are counted have one label of their own at most: the key of a table
in `ConnectorStats`."""

SGLANG = (
    _counter("pages", "Pages loaded from or saved to the pool", "operation"),
    _counter("bytes", "Bytes moved from or to the pool", "operation"),
    _counter("seconds", "Seconds spent moving pages", "operation"),
    _counter(
        "queried_tokens",
        "Prompt tokens in full pages that SGLang asked the pool for: all hit_tokens and all miss_tokens",
    ),
    _counter("hit_tokens", "Prompt tokens that were loaded from the pool"),
    MISS_TOKENS,
    *EVICTED,
    PREFILL_SECONDS_SAVED,
    LOAD_DURATION,
    SAVE_DURATION,
    _counter("failures", "Operations that failed", "operation", "cause"),
    _counter(
        "tier_pages",
        "Pages that tiers were bringing when SGLang looked for them (promised), of these those that were loaded "
        "(landed) and those that it then asked for in vain (lost)",
        "outcome",
    ),
    _counter("tier_waits", "Lookups that waited until tiers had said which pages they have"),
    _counter("tier_wait_seconds", "Seconds that they waited"),
    _counter("transfers", "Requests' KV sent or fetched, well or not", "operation"),
    _counter("transfer_bytes", "KV sent or fetched", "operation"),
    _counter("transfer_seconds", "Seconds from a request's beginning to its end", "operation"),
    FETCH_DURATION,
    _counter("transport_bytes", "KV sent, by transport", "transport"),
    TRANSPORTS_LEFT_OUT,
    *RAILS,
    TLS_PROCESS_ENDS,
)
"""Of an SGLang instance, over its ranks."""

EVICTED_AGE = _histogram(
    "pool_evicted_age_seconds", "How long a page had not been used when it was evicted to make room", AGES_S
)

POOL = (
    _gauge("pool_capacity_bytes", "Bytes that pages may take", of="capacity_nbytes"),
    _gauge("pool_used_bytes", "Bytes that pages take", of="used_nbytes"),
    _gauge("pool_pages", "Pages in the pool", of="pages"),
    _gauge("pool_max_pages", "Pages that the index has room for", of="max_pages"),
    _gauge("pool_index_bytes", "Memory taken by everything but the pages, at the pool's full size", of="index_nbytes"),
    _counter("pool_hit_pages", "Pages of prompts that lookups found in the pool", of="hit_pages"),
    _counter("pool_missed_pages", "Pages of prompts that lookups did not find in the pool", of="missed_pages"),
    _counter("pool_hit_tokens", "Tokens of prompts that lookups found in the pool", of="hit_tokens"),
    _counter("pool_missed_tokens", "Tokens of prompts that lookups did not find in the pool", of="missed_tokens"),
    _counter("pool_read_pages", "Pages read from the pool", of="read_pages"),
    _counter("pool_read_bytes", "Bytes of pages read from the pool", of="read_nbytes"),
    _counter("pool_stored_pages", "Pages newly stored", of="stored_pages"),
    _counter("pool_stored_bytes", "Bytes of pages newly stored", of="stored_nbytes"),
    _counter("pool_present_pages", "Pages that were to be stored and were there already", of="present_pages"),
    _counter("pool_evicted_pages", "Pages that went to make room for others", of="evicted_pages"),
    EVICTED_AGE,
    _counter("pool_removed_pages", "Pages that were cleared", of="removed_pages"),
    _counter("pool_corrupt_pages", "Pages that did not match their checksum: they are misses", of="corrupt_pages"),
    _counter(
        "pool_reclaimed_bytes", "Bytes that dead writers had reserved and that came back", of="reclaimed_nbytes"
    ),
    _counter("pool_failures", "Operations on a page of the pool that failed, by cause", "cause", of="failures"),
    _gauge(
        "pool_oldest_page_seconds", "Age of the oldest page of a model: how far back the pool reaches",
        "namespace", "model", of="oldest_s",
    ),
)  # fmt: skip
"""Of the pool, over all processes of the host; counters since the pool was made."""

TIER = (
    _gauge("tier_up", "1 where the tier is read from, 0 where it is left alone after failures", "tier", of="up"),
    _gauge("tier_queued_pages", "Pages that are still to be fetched from the tier", "tier", of="queued_pages"),
    _gauge("tier_latency_s", "Seconds that the tier takes for an answer, as measured lately", "tier", of="latency_s"),
    _gauge("tier_bandwidth", "Bytes a second that the tier delivers, as measured lately", "tier", of="bandwidth"),
    _gauge("tier_capacity_bytes", "Bytes that the tier may take", "tier", of="capacity_nbytes"),
    _gauge("tier_used_bytes", "Bytes that the tier takes", "tier", of="used_nbytes"),
    _gauge("tier_held_pages", "Pages in the tier", "tier", of="pages"),
    _gauge("tier_retry_s", "Seconds until a tier that is left alone is tried again", "tier", of="retry_s"),
    _counter("tier_asked_pages", "Pages that the tier was asked for", "tier", of="asked_pages"),
    _counter("tier_hit_pages", "Of these, those that it said it has", "tier", of="hit_pages"),
    _counter("tier_fetched_pages", "Pages fetched from the tier into the pool", "tier", of="fetched_pages"),
    _counter("tier_fetched_bytes", "Bytes of pages fetched from the tier", "tier", of="fetched_nbytes"),
    _counter("tier_fetch_s", "Seconds of all reads, those at the same time counted each", "tier", of="fetch_s"),
    _counter("tier_written_pages", "Pages of the pool written to the tier", "tier", of="written_pages"),
    _counter("tier_written_bytes", "Bytes of pages written to the tier", "tier", of="written_nbytes"),
    _counter("tier_write_s", "Seconds of all writes, those at the same time counted each", "tier", of="write_s"),
    _counter("tier_present_pages", "Pages given to the tier that it had", "tier", of="present_pages"),
    _counter(
        "tier_overtaken_pages", "Pages that were gone from the pool before the tier was given them", "tier",
        of="overtaken_pages",
    ),
    _counter(
        "tier_not_worth_it_pages", "Pages the tier has that the engine computes faster", "tier", of="not_worth_it_pages"
    ),
    _counter(
        "tier_corrupt_pages", "Pages whose seal did not fit; they are removed from the tier", "tier", of="corrupt_pages"
    ),
    _counter(
        "tier_undelivered_pages", "Pages the tier said it has and did not deliver", "tier", of="undelivered_pages"
    ),
    _counter("tier_evicted_pages", "Pages that the tier gave up to make room", "tier", of="evicted_pages"),
    _counter("tier_errors", "Calls of the tier that failed, by cause", "tier", "cause", of="errors"),
)  # fmt: skip
"""Of each tier behind the pool, as the agent reports it; counters since the agent was started."""


ROUTER = (
    _counter("router_requests", "Requests sent to an instance", "role", "url", of="asked"),
    _gauge("router_running_requests", "Requests that an instance has under way", "role", "url", of="load"),
    _gauge(
        "router_prefill_tokens", "Tokens that an instance has still to compute before it answers, as far as known",
        "role", "url", of="prefill_tokens",
    ),
    _counter(
        "router_prompt_tokens", "Tokens of prompts that an instance was sent to compute, counted or estimated",
        "role", "url", of="prompt_tokens",
    ),
    _counter(
        "router_cached_tokens", "Of these, tokens that it was thought to have in its cache",
        "role", "url", of="cached_tokens",
    ),
)  # fmt: skip
"""Of the built-in router of `up`, for each instance; tokens with the policy `conductor` alone."""
ROUTER_INDEX = _counter("router_index_questions", "Requests by what became of asking the index about them", "outcome")
INDEX = (
    _gauge("index_instances", "Registered ranks of instances", of="instances"),
    _gauge("index_blocks", "Blocks in engines' own memory that events told of", of="blocks"),
    _counter(
        "index_without_namespace", "Questions for instances whose pages in the pool are not known by name",
        of="without_namespace",
    ),
    _counter(
        "index_events", "What became of engines' KV events (gaps, restarts, replays, blocks)", "what", of="events"
    ),
    _counter("index_http_answers", "Answers to requests, by path and status", "path", "status", of="answers"),
)  # fmt: skip
"""Of an agent's index."""


def by_figure(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.figure: metric for metric in metrics}
