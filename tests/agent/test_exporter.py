"""The host's metrics, as Prometheus reads them from the agent."""

from __future__ import annotations

import dataclasses
import socket
import urllib.request

from agent.asking import answers_at, free_port
from agent.stand_in import running, tiered
from prometheus_client.parser import text_string_to_metric_families

from mooncake_connector.metrics.registry import EVICTED_AGE, POOL, TIER
from store_client.agent.exporter import pool_families
from store_client.agent.report import TierReport
from store_client.base import StoreStats
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain


def samples(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}


def test_pool_and_tiers_are_served_on_the_loopback_alone(pool):
    port = free_port()
    with running(pool, agent_metrics_port=port), tiered(pool) as store:
        put_chain(store.space(namespace(), SHARD, PAGE_NBYTES), chain("a", 3))
        found = samples(port)
        assert answers_at(port) == {"127.0.0.1"}
    assert found["mooncake_connector_pool_pages",] == 3
    assert found["mooncake_connector_pool_used_bytes",] >= 3 * PAGE_NBYTES
    assert ("mooncake_connector_pool_evicted_pages_total",) in found
    assert found["mooncake_connector_pool_oldest_page_seconds", namespace().digest.hex()[:12], "m"] >= 0
    assert found["mooncake_connector_tier_fetched_pages_total", "played"] == 7
    assert found["mooncake_connector_tier_errors_total", "played", "timeout"] == 2


def test_every_figure_of_a_pool_and_of_a_tier_has_a_metric():
    """Names, texts and times of day are none."""
    for kind, metrics, without in (
        (StoreStats, POOL, {"location", "evicted_ages", "evicted_unused_s"}),
        (TierReport, TIER, {"title", "kind", "reads", "writes", "cause", "notes"}),
    ):
        fields = {field.name for field in dataclasses.fields(kind)} - without
        assert fields == {metric.figure for metric in metrics} - {"up", "oldest_s", EVICTED_AGE.figure}


def test_how_long_evicted_pages_were_unused_is_a_histogram():
    ages = (*(0,) * 3, 2, *(0,) * 8, 1)
    stats = StoreStats("/pool", 100, 50, 1, 10, 10, evicted_pages=3, evicted_ages=ages, evicted_unused_s=900_000)
    (family,) = (each for each in pool_families(stats, []) if each.name.endswith("evicted_age_seconds"))
    found = {(each.name.rpartition("_")[2], each.labels.get("le")): each.value for each in family.samples}
    assert [found["bucket", bound] for bound in ("15.0", "60.0", "604800.0", "+Inf")] == [0, 2, 2, 3]
    assert found["count", None] == 3 and found["sum", None] == 900_000


def test_a_port_that_is_taken_costs_the_metrics_alone(pool, caplog):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running(pool, agent_metrics_port=taken.getsockname()[1]),
        tiered(pool),
    ):
        pass
    assert any("another `agent_metrics_port`" in line for line in caplog.messages)
