"""What vLLM finds of us: registration, configuration, statistics, metrics, shutdown, and beside others."""

from __future__ import annotations

import importlib.metadata
import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import oracle
import pytest
from cases import PROMPT, Start, every_runner, warm_pool, warmed
from harness import Engine
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from settings import Setup, multi_connector, transfer_config
from simulated.waiting import wait_for
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

import vllm_plugin
from mooncake_connector.config import sources
from mooncake_connector.errors import ConfigError
from mooncake_connector.metrics.registry import VLLM, Kind
from mooncake_connector.prefill_speed import PrefillSpeed
from store_client.embedded import registry as pools
from vllm_plugin.connector import MooncakeKVConnector
from vllm_plugin.stats import ConnectorPromMetrics, ConnectorStats

OTHER = list(range(200, 300))


# Registration


def test_registering_twice_is_harmless() -> None:
    """vLLM's registry raises for a name that it knows, and loads plugins more than once a process."""
    vllm_plugin.register()
    vllm_plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("MooncakeKVConnector") is MooncakeKVConnector


def test_the_name_is_the_class_name_and_vllm_finds_it_by_entry_point() -> None:
    """MultiConnector rebuilds statistics by `__class__.__name__`, so any other name would break its metrics."""
    assert MooncakeKVConnector.__name__ == vllm_plugin.CONNECTOR
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="mooncake_connector")
    assert [point.value for point in points] == ["vllm_plugin:register"]


def test_the_connector_is_usable_by_module_path_alone(
    start: Start, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(KVConnectorFactory._registry, "MooncakeKVConnector")
    transfer = transfer_config(Setup(), pool) | {"kv_connector_module_path": "vllm_plugin.connector"}
    engine = start(transfer=transfer)
    assert engine.ask(PROMPT) == oracle.generate(PROMPT, 3)
    assert all(engine.pages(PROMPT))


def test_vllm_keeps_its_hybrid_memory_allocator_beside_us() -> None:
    assert supports_hma(MooncakeKVConnector)


@pytest.mark.parametrize(("role", "required"), [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)])
def test_vllm_ends_no_preempted_request_without_its_kv_where_it_may_be_a_hand_over(
    start: Start, role: str, required: bool
) -> None:
    assert start(kv_role=role).scheduler.requires_kv_delivery is required


@pytest.mark.parametrize("written", [{}, {"kv_load_failure_policy": "fail"}, {"kv_load_failure_policy": "recompute"}])
@pytest.mark.parametrize("wanted", ["recompute", "fail"])
def test_one_line_says_that_the_policy_for_failed_loads_is_replaced(
    start: Start, pool: Path, caplog: pytest.LogCaptureFixture, written: dict[str, str], wanted: str
) -> None:
    transfer = transfer_config(Setup(extra={"transfer_failure": wanted}), pool) | written
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            engine = start(tp_size=2, transfer=transfer)
    assert engine.scheduler.recompute_kv_load_failures is (wanted == "recompute")
    said = [one.getMessage() for one in caplog.records if "kv_load_failure_policy" in one.getMessage()]
    replaced = written.get("kv_load_failure_policy", "fail") != wanted
    assert len(said) == replaced
    assert all("transfer_failure" in line and wanted in line for line in said)


# Configuration


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"page_tokenz": 64}, ["page_tokenz", "page_tokens"]),
        ({"page_tokens": 48}, ["page_tokens", "48", "power of two from 16 to 1024"]),
        ({"load_deadline_s": "soon"}, ["load_deadline_s", "soon", "number"]),
        ({"capacity": "1B"}, ["capacity", "1B", "1MiB"]),
    ],
)
def test_a_wrong_setting_stops_the_start_and_names_key_value_and_what_is_allowed(
    start: Start, extra: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        start(extra=extra)
    assert all(word in str(raised.value) for word in named)


# Statistics and metrics


def engine_stats(engine: Engine) -> dict[str, Any]:
    """What vLLM's log line would sum up over all steps."""
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    log = KVConnectorLogging(transfer)
    for stats in engine.stats:
        if stats.kv_connector_stats:
            log.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.kv_connector_stats)))
    return log.transfer_stats_accumulator.reduce() if log.transfer_stats_accumulator else {}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_statistics_reach_vllm(start: Start, tp_size: int) -> None:
    warm_pool(start, tp_size=tp_size)
    engine = start(tp_size=tp_size)
    engine.ask(PROMPT)
    engine.ask(OTHER)
    figures = engine_stats(engine)
    assert figures["pool hit tokens"] == 96
    assert figures["pool queried tokens"] == 200
    assert figures["loads"] == tp_size
    assert figures["load MB"] == pytest.approx(6 * 16 * 2 * 2 * 8 / 1e6, abs=1e-3)
    assert not any(name.startswith("failed") for name in figures)


def test_failures_are_counted_by_cause(start: Start, faults) -> None:
    engine = warmed(start)
    faults.lose_reads = lambda keys: [True] * len(keys)
    faults.refuse_writes = True
    engine.ask([*PROMPT, *OTHER])
    figures = engine_stats(engine)
    assert figures["failed: load_page_lost"] == 1
    assert figures["failed: save_pool_refused"] >= 1
    assert figures["pool hit tokens"] == 0, "tokens that did not arrive are no hits"


def test_statistics_add_up_in_any_order() -> None:
    one = ConnectorStats({"loads": 1, "load_bytes": 10, "failures": {"a": 1}})
    two = ConnectorStats({"loads": 2, "saves": 1, "failures": {"a": 1, "b": 3}})
    left = ConnectorStats().aggregate(one).aggregate(two).data
    right = ConnectorStats().aggregate(two).aggregate(one).data
    assert left == right == {"loads": 3, "load_bytes": 10, "saves": 1, "failures": {"a": 2, "b": 3}}
    assert two.data["failures"] == {"a": 1, "b": 3}, "what is added is not changed"
    assert ConnectorStats().is_empty()
    assert ConnectorStats().reduce()["pool hit tokens"] == 0


def test_figures_that_cannot_be_added_or_shown_reach_nobody_as_an_error(start: Start) -> None:
    """As of an engine of another version behind the same front end."""
    odd = {"loads": {"of": 1}, "failures": 3, "load_duration_seconds": "soon", "later": [1], "hit_tokens": 5}
    stats = ConnectorStats({"loads": 1}).aggregate(ConnectorStats(dict(odd))).aggregate(ConnectorStats(dict(odd)))
    assert stats.data["hit_tokens"] == 10
    assert ConnectorStats(dict(odd)).reduce() == {}
    engine, registry = start(), CollectorRegistry()
    metrics = prometheus(engine, registry)
    metrics.observe(odd, 0)
    metrics.observe({"hit_tokens": 1}, 7)
    assert sample(registry, "hit_tokens", "0") == 5


def test_the_periodic_line_keeps_no_values_of_histograms(start: Start) -> None:
    """vLLM adds up for it whether or not it is ever written."""
    warm_pool(start)
    engine = start()
    engine.ask(PROMPT)
    shown = [stats.kv_connector_stats for stats in engine.stats if stats.kv_connector_stats]
    assert any("load_duration_seconds" in one for one in shown)
    log = KVConnectorLogging(engine.scheduler.vllm_config.kv_transfer_config)
    for one in shown:
        log.observe(one)
    kept = log.transfer_stats_accumulator
    assert kept.data["loads"] == 1 and not any(isinstance(value, list) for value in kept.data.values())


def prometheus(engine: Engine, registry: CollectorRegistry) -> Any:
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    connector_class = KVConnectorFactory.get_connector_class(transfer)
    return connector_class.build_prom_metrics(
        engine.scheduler.vllm_config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )


def sample(registry: CollectorRegistry, figure: str, engine: str = "0", **labels: str) -> float | None:
    name = f"vllm:mooncake_connector_{figure}_total"
    return registry.get_sample_value(name, {"model_name": "m", "engine": engine, **labels})


def histogram(registry: CollectorRegistry, name: str, engine: str) -> tuple[float | None, float | None]:
    """How many values it has, and their sum."""
    labels = {"model_name": "m", "engine": engine}
    name = f"vllm:mooncake_connector_{name}"
    return registry.get_sample_value(f"{name}_count", labels), registry.get_sample_value(f"{name}_sum", labels)


def bucket(registry: CollectorRegistry, name: str, engine: str, bound: str) -> float | None:
    labels = {"model_name": "m", "engine": engine, "le": bound}
    return registry.get_sample_value(f"vllm:mooncake_connector_{name}_bucket", labels)


def observe(engine: Engine, metrics: Any, engine_index: int = 0) -> None:
    for stats in engine.stats:
        if stats.kv_connector_stats:
            metrics.observe(stats.kv_connector_stats, engine_index)


def test_prometheus_counters_hold_what_the_engine_did(start: Start) -> None:
    warm_pool(start)
    engine, registry = start(), CollectorRegistry()
    metrics = prometheus(engine, registry)
    plain = [metric.name for metric in VLLM if metric.kind is Kind.COUNTER and not metric.labels]
    assert len(plain) > 20 and all(sample(registry, name, index) == 0 for name in plain for index in "01")
    engine.ask(PROMPT)
    engine.ask(OTHER)
    observe(engine, metrics, 1)
    assert sample(registry, "hit_tokens", "1") == 96
    assert sample(registry, "hit_tokens", "0") == 0
    for kind in ("load", "save"):
        ended = sample(registry, f"{kind}s", "1")
        assert ended and histogram(registry, f"{kind}_duration_seconds", "1") == (
            ended, pytest.approx(sample(registry, f"{kind}_seconds", "1")),
        )  # fmt: skip


@pytest.mark.parametrize("page_tokens, said", [(32, "32"), (0, "")], ids=("set", "by default"))
def test_what_the_engine_computes_in_and_its_page_where_that_was_set(start: Start, page_tokens: int, said: str) -> None:
    engine, registry = start(page_tokens=page_tokens), CollectorRegistry()
    prometheus(engine, registry)
    labels = {"model_name": "m", "engine": "1", "dtype": "float16", "page_tokens": said}
    assert registry.get_sample_value("vllm:mooncake_connector_engine_info", labels) == 1


def test_metrics_read_the_configuration_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reads, read = start(), list[Any](), sources._from_environ
    monkeypatch.setattr(sources, "_from_environ", lambda environ: reads.append(environ) or read(environ))
    of_registry = {kind: partial(kind, registry=CollectorRegistry()) for kind in (Gauge, Counter, Histogram)}
    ConnectorPromMetrics(engine.scheduler.vllm_config, of_registry, ["engine"], {0: ["0"]})
    assert len(reads) == 1


def test_histograms_add_up_over_workers_and_engines_stay_apart(start: Start) -> None:
    engine, registry = start(), CollectorRegistry()
    metrics = prometheus(engine, registry)
    workers = [ConnectorStats(), ConnectorStats()]
    for number, stats in enumerate(workers):
        stats.took("load_duration_seconds", 0.5 + number)
        stats.took("load_duration_seconds", 0.25)
    merged = ConnectorStats().aggregate(workers[0]).aggregate(workers[1])
    assert workers[0].data == {"load_duration_seconds": [0.5, 0.25]}, "what is added is not changed"
    metrics.observe(merged.to_dict(), 1)
    assert histogram(registry, "load_duration_seconds", "1") == (4, 2.5)
    assert histogram(registry, "load_duration_seconds", "0") == (0, 0)
    assert bucket(registry, "load_duration_seconds", "1", "0.5") == 3


def test_seconds_saved_are_hit_tokens_over_the_measured_speed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step of prefill nobody knows the speed, and nothing is counted."""
    warm_pool(start)
    engine, registry = start(), CollectorRegistry()
    metrics = prometheus(engine, registry)
    engine.ask(PROMPT)
    observe(engine, metrics, 0)
    monkeypatch.setattr(PrefillSpeed, "tokens_s", 48.0)
    engine = start()
    engine.ask(PROMPT)
    observe(engine, metrics, 1)
    assert [sample(registry, "hit_tokens", index) for index in "01"] == [96, 96]
    assert [sample(registry, "prefill_seconds_saved", index) for index in "01"] == [0, 2]


def test_prometheus_failures_carry_their_cause(start: Start) -> None:
    engine, registry = start(), CollectorRegistry()
    metrics = prometheus(engine, registry)
    metrics.observe({"failures": {"load_page_lost": 2}}, 0)
    assert sample(registry, "failures", cause="load_page_lost") == 2


# Shutdown


def test_shutdown_twice_and_calls_after_it_are_harmless(start: Start) -> None:
    engine = start()
    engine.ask(PROMPT)
    for _ in range(2):
        engine.connector.shutdown()
        engine.workers[0].connector.shutdown()
    assert engine.ask(OTHER, 20) == oracle.generate(OTHER, 20)


def test_shutdown_inside_of_a_lock_that_it_needs_ends(
    start: Start, pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has the collector of cycles end an engine that its user's process refers to no more. It may be at work in
    the thread that opens the next engine's pool."""
    monkeypatch.setattr(pools, "_lock", threading.Lock())
    monkeypatch.setattr("vllm_plugin.connector._CLOSE_S", 0.2)
    engine = start()
    engine.ask(PROMPT)
    assert pool in pools._handles

    def collected() -> None:
        with pools._lock:
            engine.connector.shutdown()
            engine.workers[0].connector.shutdown()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(60.0)
    if hung := thread.is_alive():
        pools._lock.release()  # for the end of the test
    assert not hung
    wait_for(lambda: pool not in pools._handles)


def test_shutdown_while_a_load_and_a_save_hang_ends(start: Start, faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_plugin.prefix.worker._STOP_S", 0.05)
    engine = warmed(start)
    faults.hold_reads()
    faults.hold_writes()
    engine.add(PROMPT)
    engine.add(OTHER)
    engine.run(until=lambda: faults.reading.is_set() and faults.writing.is_set())
    engine.shut_down()


# Beside another connector


def multi(pool: Path, other: Path) -> dict[str, Any]:
    theirs = {"kv_connector_extra_config": {"shared_storage_path": str(other)}}
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"} | theirs
    return multi_connector(transfer_config(Setup(), pool), example)


@every_runner
def test_inside_multi_connector_pages_are_reused_and_counted(start: Start, pool: Path, tmp_path: Path) -> None:
    transfer = multi(pool, tmp_path)
    first = start(transfer=transfer, hybrid_manager_off=True)
    first.check(PROMPT, 20)
    engine = start(transfer=transfer, hybrid_manager_off=True)
    engine.check(PROMPT, 20, computed=4 + 19)
    assert engine_stats(engine)["MooncakeKVConnector"]["pool hit tokens"] == 96
    registry = CollectorRegistry()
    observe(engine, prometheus(engine, registry))
    assert sample(registry, "hit_tokens") == 96


def test_inside_multi_connector_a_lost_page_is_recomputed(start: Start, pool: Path, tmp_path: Path, faults) -> None:
    """vLLM reads the failure policy of the outer configuration alone, so there it has to be written."""
    engine = warmed(start, transfer=multi(pool, tmp_path), hybrid_manager_off=True)
    faults.lose_reads = lambda keys: [True] * len(keys)
    assert engine.ask(PROMPT, 20) == oracle.generate(PROMPT, 20)
    assert engine.reasons["r0"] == "length"
    engine.check_at_rest()


def test_a_match_that_another_connector_loads_is_not_loaded_by_us(start: Start, faults) -> None:
    """Under MultiConnector `update_state_after_alloc(..., 0)` says that somebody else was chosen."""
    engine = warmed(start)
    request = engine.requests[engine.add(PROMPT)]
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    engine.connector.update_state_after_alloc(request, engine.scheduler.kv_cache_manager.empty_kv_cache_blocks, 0)
    assert not engine.prefix._metadata.loads
