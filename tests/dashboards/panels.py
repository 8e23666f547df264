"""What the dashboard shows. Metrics of ours are looked up in the registry, so that no query names one that is not."""

from __future__ import annotations

from collections.abc import Iterable

from dashboards.grafana import (
    BYTES,
    BYTES_A_SECOND,
    NUMBER,
    SECONDS,
    SHARE,
    Panel,
    Query,
    Row,
)
from mooncake_connector.metrics.registry import POOL, PREFIX, SGLANG, TIER, VLLM, VLLM_PREFIX, Metric

__all__ = ["METRICS", "ROWS"]

METRICS = f"({VLLM_PREFIX}|{PREFIX}).*"
"""Names of ours, as a regular expression."""
OVER_ALL, LATELY = "$__range", "$__rate_interval"


class Names:
    """Selectors of some metrics: `names("hits")` is the one that is called so without its prefix."""

    def __init__(self, metrics: Iterable[Metric], prefix: str = PREFIX) -> None:
        self._series = {metric.name: metric.series(prefix) for metric in metrics}

    def __call__(self, name: str, *more: str, suffix: str = "") -> str:
        return chosen(f"{self._series[name]}{suffix}", *more)


def chosen(series: str, *more: str) -> str:
    """Of the instances that are chosen above the dashboard."""
    labels = ",".join(('instance=~"$instance"', *more))
    return f"{series}{{{labels}}}"


def of_sglang(name: str) -> str:
    """A metric of SGLang's own. A Prometheus before 3 asks for OpenMetrics without saying how names are escaped, and is
    told `sglang_` for `sglang:`."""
    return chosen("", f'__name__=~"sglang[:_]{name}"')


vllm, sglang = Names(VLLM, VLLM_PREFIX), Names(SGLANG)
pool, tier = Names(POOL), Names(TIER)


def a_second(selector: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) (rate({selector}[{LATELY}]))" if by else f"sum(rate({selector}[{LATELY}]))"


def in_all(selector: str) -> str:
    """Over the time that is shown."""
    return f"sum(increase({selector}[{OVER_ALL}]))"


def of_both(counter: str) -> str:
    """Of both kinds of engine over the time that is shown, also where there is one alone."""
    return " + ".join(f"({in_all(of(counter))} or vector(0))" for of in (vllm, sglang))


def quantiles(of: Names, histogram: str, engine: str) -> list[Query]:
    buckets = a_second(of(histogram, suffix="_bucket"), "le")
    return [
        Query(f"histogram_quantile({quantile}, {buckets})", f"{engine} p{quantile * 100:.0f}")
        for quantile in (0.5, 0.99)
    ]


def duration(title: str, kind: str, text: str) -> Panel:
    name = f"{kind}_duration_seconds"
    both = [*quantiles(vllm, name, "vLLM"), *quantiles(sglang, name, "SGLang")]
    return Panel(title, "lines", SECONDS, text, both)


HITS = Row(
    "Hits",
    [
        Panel(
            "Hit rate", "number", SHARE,
            "Of the prompt tokens that vLLM looked up in the pool, those that were loaded from it.",
            [Query(f"{in_all(vllm('hit_tokens'))} / {in_all(vllm('queried_tokens'))}", "pool")], 4,
        ),
        Panel(
            "Prefill saved", "number", SECONDS,
            "Seconds of prefill that hits saved: their tokens over the speed that each engine measured of itself.",
            [Query(of_both("prefill_seconds_saved"), "saved")], 4,
        ),
        Panel(
            "Tokens from the pool", "number", NUMBER, "Prompt tokens that vLLM loaded instead of computing them.",
            [Query(in_all(vllm("hit_tokens")), "tokens")], 4,
        ),
        Panel(
            "Fill", "number", SHARE, "Of the pools' capacity. To be full is normal: what is used least is evicted.",
            [Query(f"sum({pool('pool_used_bytes')}) / sum({pool('pool_capacity_bytes')})", "used")], 4,
        ),
        Panel(
            "Failures", "number", NUMBER, "Loads, saves and transfers that failed; each was answered by computing.",
            [Query(of_both("failures"), "failed")], 4,
        ),
        Panel(
            "Tiers down", "number", NUMBER, "Tiers that are left alone after failures.",
            [Query(f"count({tier('tier_up')}) - sum({tier('tier_up')})", "down")], 4,
        ),
        Panel(
            "Hit rate over time", "lines", SHARE,
            "Local: of all prompt tokens, those in vLLM's own cache. Pool: of the rest, those loaded from the pool; "
            "tiers: those of them that a tier brought. All levels of SGLang: its own, the host's memory and the pool.",
            [
                Query(
                    f"{a_second(chosen('vllm:prefix_cache_hits_total'))} / "
                    f"{a_second(chosen('vllm:prefix_cache_queries_total'))}", "vLLM, local",
                ),
                Query(f"{a_second(vllm('hit_tokens'))} / {a_second(vllm('queried_tokens'))}", "vLLM, pool"),
                Query(f"{a_second(vllm('tier_hit_tokens'))} / {a_second(vllm('queried_tokens'))}", "vLLM, tiers"),
                Query(
                    f"{a_second(of_sglang('cached_tokens_total'))} / {a_second(of_sglang('prompt_tokens_total'))}",
                    "SGLang, all levels",
                ),
                Query(f"{a_second(sglang('hit_tokens'))} / {a_second(sglang('queried_tokens'))}", "SGLang, pool"),
            ], 12,
        ),
        Panel(
            "Why tokens missed", "areas", NUMBER,
            "Prompt tokens a second that did not come from the pool, by the reason of the first page that was missing. "
            "`mooncake-connector doctor --url` says what to do about each.",
            [
                Query(a_second(vllm("miss_tokens"), "reason"), "vLLM, {{reason}}"),
                Query(a_second(sglang("miss_tokens"), "reason"), "SGLang, {{reason}}"),
            ], 12,
        ),
        Panel(
            "Prompt tokens by source", "areas", NUMBER,
            "A second, in vLLM: computed, found in its own cache, or loaded by this connector.",
            [Query(a_second(chosen("vllm:prompt_tokens_by_source_total"), "source"), "{{source}}")], 12,
        ),
        Panel(
            "Prefill seconds saved", "lines", NUMBER,
            "Seconds of prefill saved in each second, by instance: 1 is what one more such instance would compute.",
            [
                Query(a_second(vllm("prefill_seconds_saved"), "instance"), "vLLM, {{instance}}"),
                Query(a_second(sglang("prefill_seconds_saved"), "instance"), "SGLang, {{instance}}"),
            ], 12,
        ),
    ],
)  # fmt: skip

POOLS = Row(
    "Pool",
    [
        Panel(
            "Bytes", "lines", BYTES_A_SECOND, "Loaded from the pool into the engines and saved from them.",
            [
                Query(a_second(vllm("load_bytes")), "vLLM, load"),
                Query(a_second(vllm("save_bytes")), "vLLM, save"),
                Query(a_second(sglang("bytes"), "operation"), "SGLang, {{operation}}"),
            ],
        ),
        Panel(
            "Fill over time", "lines", BYTES, "Of each pool, by the agent that reports it.",
            [
                Query(pool("pool_used_bytes"), "{{instance}} used"),
                Query(pool("pool_capacity_bytes"), "{{instance}} capacity"),
            ],
        ),
        Panel(
            "Pages stored and evicted", "lines", NUMBER, "A second. Evicted: to make room for others.",
            [
                Query(a_second(pool("pool_stored_pages")), "stored"),
                Query(a_second(pool("pool_evicted_pages")), "evicted"),
                Query(a_second(pool("pool_removed_pages")), "cleared"),
            ],
        ),
        Panel(
            "Age of what is evicted", "lines", SECONDS,
            "How long pages had not been used when they were evicted. Minutes mean that the pool is too small. Asked "
            "for again: of those that were missed, how long after their last use: a pool should keep pages so long.",
            [
                *[
                    Query(
                        f"histogram_quantile({quantile}, "
                        f"{a_second(pool('pool_evicted_age_seconds', suffix='_bucket'), 'le')})",
                        f"p{quantile * 100:.0f}",
                    )
                    for quantile in (0.1, 0.5)
                ],
                *[
                    Query(
                        f"{a_second(of('evicted_reuse_seconds'))} / {a_second(of('evicted_requests'))}",
                        f"asked for again by {engine}, mean",
                    )
                    for of, engine in ((vllm, "vLLM"), (sglang, "SGLang"))
                ],
                Query(f"max({pool('pool_oldest_page_seconds')})", "oldest page"),
            ],
        ),
        duration("Loads", "load", "From the submission of a load to its end."),
        duration("Saves", "save", "From the submission of a save to its end. Requests do not wait for it."),
    ],
)  # fmt: skip

APART = Row(
    "Prefill and decode apart",
    [
        Panel(
            "Transfers", "lines", NUMBER, "Requests a second whose KV was sent or fetched, well or not.",
            [
                Query(a_second(vllm("sends")), "vLLM, sent"),
                Query(a_second(vllm("fetches")), "vLLM, fetched"),
                Query(a_second(sglang("transfers"), "operation"), "SGLang, {{operation}}"),
            ],
        ),
        Panel(
            "KV sent, by transport", "areas", BYTES_A_SECOND, "From prefill to decode instances.",
            [
                Query(a_second(vllm("transport_bytes"), "transport"), "vLLM, {{transport}}"),
                Query(a_second(sglang("transport_bytes"), "transport"), "SGLang, {{transport}}"),
            ],
        ),
        duration("Fetches", "fetch", "From the announcement of a transfer to its end, prefill included."),
    ],
)  # fmt: skip

TIERS = Row(
    "Tiers",
    [
        Panel(
            "Up", "lines", NUMBER, "1: the tier is read from. 0: it is left alone after failures, and tried again.",
            [Query(tier("tier_up"), "{{tier}} {{instance}}")],
        ),
        Panel(
            "Fetched and written", "lines", BYTES_A_SECOND, "Between the pool and each tier.",
            [
                Query(a_second(tier("tier_fetched_bytes"), "tier"), "{{tier}}, fetched"),
                Query(a_second(tier("tier_written_bytes"), "tier"), "{{tier}}, written"),
            ],
        ),
        Panel(
            "Hit rate of tiers", "lines", SHARE, "Of the pages that each tier was asked for, those that it has.",
            [
                Query(
                    f"{a_second(tier('tier_hit_pages'), 'tier')} / {a_second(tier('tier_asked_pages'), 'tier')}",
                    "{{tier}}",
                )
            ],
        ),
    ],
)  # fmt: skip

FAILURES = Row(
    "Failures, by cause",
    [
        Panel(
            "Engines", "areas", NUMBER,
            "A second. Each was answered by computing; docs/troubleshooting.md says what to do about a cause.",
            [
                Query(a_second(vllm("failures"), "cause"), "vLLM, {{cause}}"),
                Query(a_second(sglang("failures"), "operation", "cause"), "SGLang, {{operation}} {{cause}}"),
            ],
        ),
        Panel(
            "Pool", "areas", NUMBER, "Operations on a page of the pool that failed, a second.",
            [Query(a_second(pool("pool_failures"), "cause"), "{{cause}}")],
        ),
        Panel(
            "Tiers", "areas", NUMBER, "Calls of a tier that failed, a second.",
            [Query(a_second(tier("tier_errors"), "tier", "cause"), "{{tier}} {{cause}}")],
        ),
    ],
)  # fmt: skip

ROWS = (HITS, POOLS, APART, TIERS, FAILURES)
