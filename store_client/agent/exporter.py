"""The host's metrics for Prometheus, on a port of the loopback: the pool, and each tier as what fetches reports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.log import get_logger, log_once
from store_client.agent.wish import Fetches
from store_client.base import Store

_PREFIX = "mooncake_connector"
_POOL_GAUGES = ("capacity_nbytes", "used_nbytes", "pages", "max_pages", "index_nbytes")
_TIER_GAUGES = ("up", "queued_pages", "latency_s", "bandwidth", "capacity_nbytes", "used_nbytes", "pages", "retry_s")
_NOT_COUNTED = ("location", "failures")

logger = get_logger(__name__)


class Exporter(Collector):
    """Serves while it is entered. A port that is taken is a line in the log, and no reason to do without an agent."""

    def __init__(self, port: int, store: Store, fetches: Fetches) -> None:
        self._port, self._store, self._fetches = port, store, fetches
        self._server: Any = None

    def __enter__(self) -> Exporter:
        if self._port:
            registry = CollectorRegistry()
            registry.register(self)
            try:
                self._server, _ = start_http_server(self._port, addr="127.0.0.1", registry=registry)
            except OSError as error:
                said = "the agent serves no metrics at port %d: %s; set another `agent_metrics_port`"
                log_once("agent.metrics", said, self._port, error, logger=logger)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        try:
            stats = dataclasses.asdict(self._store.stats())
        except MooncakeConnectorError as error:
            log_once("agent.metrics.pool", "the pool gave no figures: %s", error, logger=logger)
        else:
            yield from self._pool(stats)
        yield from self._tiers()

    def _pool(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        for name, value in stats.items():
            if name in _NOT_COUNTED:
                continue
            full = f"{_PREFIX}_pool_{name.replace('nbytes', 'bytes')}"
            kind = GaugeMetricFamily if name in _POOL_GAUGES else CounterMetricFamily
            yield kind(full, f"{name} of the pool, over all processes of this host", value=value)
        failures = CounterMetricFamily(
            f"{_PREFIX}_pool_failures", "Operations on a page of the pool that failed", labels=["cause"]
        )
        for cause, count in stats["failures"].items():
            failures.add_metric([cause], count)
        yield failures
        reach = GaugeMetricFamily(
            f"{_PREFIX}_pool_oldest_page_seconds", "Age of the oldest page of a model: how far back the pool reaches",
            labels=["namespace", "model"],
        )  # fmt: skip
        oldest: dict[tuple[str, str], float] = {}
        for space in self._store.namespaces():
            if space.pages:
                labels = (space.namespace.digest.hex()[:12], space.namespace.model_name)
                oldest[labels] = max(oldest.get(labels, 0.0), space.oldest_s)
        for labels, age_s in oldest.items():
            reach.add_metric(labels, age_s)
        yield reach

    def _tiers(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for report in self._fetches.stats():
            values = dataclasses.asdict(report)
            tier = str(values.pop("title"))
            values["up"] = int(values.get("reads") != "open")
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._family(families, name, []).add_metric([tier], float(value))
                elif isinstance(value, Mapping):
                    for label, count in value.items():
                        if isinstance(count, int | float):
                            self._family(families, name, ["cause"]).add_metric([tier, str(label)], float(count))
        yield from families.values()

    @staticmethod
    def _family(families: dict[str, Metric], name: str, more: list[str]) -> Any:
        if name not in families:
            full = f"{_PREFIX}_tier_{name.replace('nbytes', 'bytes')}"
            kind = GaugeMetricFamily if name in _TIER_GAUGES else CounterMetricFamily
            families[name] = kind(full, f"{name} of a tier, since the agent was started", labels=["tier", *more])
        return families[name]
