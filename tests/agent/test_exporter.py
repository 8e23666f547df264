"""The host's metrics, as Prometheus reads them from the agent."""

from __future__ import annotations

import socket
import urllib.request

from agent.stand_in import running, tiered
from prometheus_client.parser import text_string_to_metric_families

from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def samples(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}


def test_pool_and_tiers_are_served_on_the_loopback(pool):
    port = free_port()
    with running(pool, agent_metrics_port=port), tiered(pool) as store:
        put_chain(store.space(namespace(), SHARD, PAGE_NBYTES), chain("a", 3))
        found = samples(port)
    assert found["mooncake_connector_pool_pages",] == 3
    assert found["mooncake_connector_pool_used_bytes",] >= 3 * PAGE_NBYTES
    assert ("mooncake_connector_pool_evicted_pages_total",) in found
    assert found["mooncake_connector_pool_oldest_page_seconds", namespace().digest.hex()[:12], "m"] >= 0
    assert found["mooncake_connector_tier_read_pages_total", "played"] == 7
    assert found["mooncake_connector_tier_errors_total", "played", "timeout"] == 2


def test_a_port_that_is_taken_costs_the_metrics_alone(pool, caplog):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running(pool, agent_metrics_port=taken.getsockname()[1]),
        tiered(pool),
    ):
        pass
    assert any("another `agent_metrics_port`" in line for line in caplog.messages)
