"""The pool's metrics on an engine's `/metrics`: right, and of one process of a host at a time."""

from __future__ import annotations

import gc
import threading

import pytest
from prometheus_client import CollectorRegistry
from simulated.waiting import wait_for
from store.pools import running, space_in

from mooncake_connector.config.sources import load_config
from mooncake_connector.metrics.registry import POOL, SGLANG, TIER, VLLM, Kind
from store_client import EmbeddedStore, pool_metrics
from store_client.embedded.folder import remove_pool
from store_client.pool_metrics import PoolMetrics
from store_client.testing import chain, put_chain

CAPACITY = 4 << 20
EVERY_S = 0.05
DISK = {"kind": "disk", "path": "/nowhere/at/all", "capacity": "1GiB"}
SHOWING = """
from mooncake_connector.config.sources import load_config
from store_client.pool_metrics import PoolMetrics
metrics = PoolMetrics(load_config({'pool': sys.argv[1]}), every_s=0.05)
while metrics._held._fd < 0: time.sleep(0.01)
print('shows it', flush=True)
sys.stdin.read()
"""

SEVERAL_PROCESSES = """
import prometheus_client.multiprocess
from mooncake_connector.config.sources import load_config
from store_client.pool_metrics import PoolMetrics
metrics = PoolMetrics(load_config({'pool': sys.argv[1]}), every_s=3600)
while metrics._held._fd < 0: time.sleep(0.01)
metrics.refresh()
registry = prometheus_client.CollectorRegistry()
prometheus_client.multiprocess.MultiProcessCollector(registry)
names = 'pool_pages', 'pool_evicted_pages_total', 'pool_evicted_age_seconds_count', 'pool_stored_pages_total'
print('ready')
print(*(int(registry.get_sample_value(f'mooncake_connector_{name}')) for name in names), flush=True)
sys.stdin.read()
"""


class Showing:
    """An engine's registry and what is in it."""

    def __init__(self, pool, **settings):
        self.registry = CollectorRegistry()
        config = load_config({"pool": str(pool), **settings})
        self.metrics = PoolMetrics(config, every_s=EVERY_S, registry=self.registry)

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"mooncake_connector_{name}", labels)


def test_it_is_what_the_pool_says(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        space = space_in(store)
        for number in range(80):
            put_chain(space, chain(f"{number}", 1))
        space.record_lookup(hit_pages=2, missed_pages=1, page_tokens=64)
        shown, stats = Showing(pool), store.stats()
        wait_for(lambda: shown.value("pool_hit_tokens_total") == 128)
        assert shown.value("pool_used_bytes") == stats.used_nbytes and shown.value("pool_pages") == stats.pages
        assert shown.value("pool_evicted_pages_total") == stats.evicted_pages > 0
        assert shown.value("pool_evicted_age_seconds_count") == stats.evicted_pages
        assert shown.value("pool_evicted_age_seconds_bucket", le="+Inf") == stats.evicted_pages
        assert shown.value("pool_evicted_age_seconds_sum") == stats.evicted_unused_s
        store.clear()
        wait_for(lambda: shown.value("pool_pages") == 0)
        assert shown.value("pool_removed_pages_total") == stats.pages


def test_it_is_the_same_where_several_processes_serve_one_page(pool, tmp_path, monkeypatch):
    """As SGLang's and several front ends of vLLM do: values are in files then, of which the page is put together."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with EmbeddedStore(pool, CAPACITY) as store:
        for number in range(80):
            put_chain(space_in(store), chain(f"{number}", 1))
        stats = store.stats()
        said = [stats.pages, stats.evicted_pages, stats.evicted_pages, stats.stored_pages]
        with running(SEVERAL_PROCESSES, pool, "-") as process:
            assert [int(word) for word in process.stdout.readline().split()] == said


def test_of_several_processes_one_shows_it_and_another_goes_on_when_that_is_killed(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(space_in(store), chain("a", 3))
        with running(SHOWING, pool, "-") as other:
            shown = Showing(pool)
            shown.metrics.refresh()
            assert shown.value("pool_pages") is None
            other.kill()
            other.wait()
            wait_for(lambda: shown.value("pool_pages") == 3)


def test_a_pool_that_is_removed_is_nothing_and_one_that_is_made_anew_is_followed(pool):
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(space_in(store), chain("a", 3))
        shown = Showing(pool)
        wait_for(lambda: shown.value("pool_pages") == 3)
    remove_pool(pool)
    wait_for(lambda: shown.value("pool_pages") == 0 and shown.value("pool_capacity_bytes") == 0)
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(space_in(store), chain("b", 2))
        wait_for(lambda: shown.value("pool_pages") == 2)
        wait_for(lambda: shown.value("pool_stored_pages_total") == 5)


def test_nothing_is_left_of_one_that_nobody_refers_to(pool):
    with EmbeddedStore(pool, CAPACITY):
        shown = Showing(pool)
        wait_for(lambda: shown.value("pool_pages") == 0)
        shown.metrics = None
        gc.collect()
        wait_for(lambda: shown.value("pool_pages") is None)
        second = Showing(pool)
        wait_for(lambda: second.value("pool_pages") == 0)


def test_one_that_nobody_refers_to_may_be_collected_inside_of_the_registry(pool):
    """As where a metric is made or shown, which may set the collector to work: the lock lets nobody in twice."""
    with EmbeddedStore(pool, CAPACITY):
        shown = Showing(pool)
        wait_for(lambda: shown.value("pool_pages") == 0)
        cycle = [shown.metrics]
        cycle.append(cycle)
        shown.metrics = cycle = None

        def collected():
            with shown.registry._lock:
                gc.collect()

        thread = threading.Thread(target=collected, daemon=True)
        thread.start()
        thread.join(60.0)
        assert not thread.is_alive()
        wait_for(lambda: shown.value("pool_pages") is None)


def test_tiers_are_what_the_agent_reports_and_count_on_when_it_is_started_again(pool, monkeypatch):
    report = {"pid": 1, "tiers": [{"title": "disk", "reads": "closed", "fetched_pages": 7, "errors": {"timeout": 2}}]}
    monkeypatch.setattr(pool_metrics, "ask_report", lambda folder: report)
    with EmbeddedStore(pool, CAPACITY):
        shown = Showing(pool, tiers=[DISK])
        wait_for(lambda: shown.value("tier_fetched_pages_total", tier="disk") == 7)
        assert shown.value("tier_up", tier="disk") == 1
        assert shown.value("tier_errors_total", tier="disk", cause="timeout") == 2
        report = {**report, "pid": 2}
        wait_for(lambda: shown.value("tier_fetched_pages_total", tier="disk") == 14)
        report = {**report, "serves_metrics": True}
        wait_for(lambda: shown.value("tier_up", tier="disk") == 0 and shown.value("pool_capacity_bytes") == 0)


@pytest.mark.parametrize("settings", [
    {"prefix_reuse": False}, {"agent_http_port": 1}, {"agent_metrics_port": 1, "tiers": [DISK]},
])  # fmt: skip
def test_nothing_is_shown_where_there_is_no_pool_or_the_agent_shows_it(pool, settings, monkeypatch):
    begun = []
    monkeypatch.setattr(pool_metrics, "start_thread", lambda *arguments: begun.append(arguments))
    Showing(pool, **settings)
    assert not begun
    Showing(pool)
    assert len(begun) == 1


def test_no_two_metrics_of_one_process_have_a_name():
    """A registry refuses the second one, and prometheus_client has a counter's name without `_total` as well."""
    for group in (VLLM, SGLANG):
        names = [metric.name for metric in (*group, *POOL, *TIER)] if group is SGLANG else [one.name for one in group]
        assert len(names) == len(set(names)) > 20
        ends = {f"{metric.name}_{end}" for metric in group if metric.kind is Kind.HISTOGRAM for end in ("sum", "count")}
        assert not ends & set(names)
