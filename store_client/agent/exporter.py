"""The host's metrics for Prometheus, on a port of the loopback: the pool, and each tier as what fetches reports it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from mooncake_connector.errors import MooncakeConnectorError
from mooncake_connector.log import get_logger, log_once
from mooncake_connector.metrics.registry import EVICTED_AGE, POOL, PREFIX, TIER, Kind, Metric
from store_client.agent.wish import Fetches
from store_client.base import SpaceInfo, StoreStats
from store_client.embedded import EmbeddedStore
from store_client.embedded.glance import Glances

_FAMILIES = {
    Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily, Kind.HISTOGRAM: HistogramMetricFamily
}  # fmt: skip

logger = get_logger(__name__)


class Exporter(Collector):
    """Serves while it is entered. A port that is taken is a line in the log, and no reason to do without an agent."""

    def __init__(self, port: int, store: EmbeddedStore, fetches: Fetches) -> None:
        self._port, self._store, self._fetches = port, store, fetches
        self._glances = Glances(store.path)
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

    def collect(self) -> Iterator[Family]:
        try:
            (_, stats), spaces = self._glances.look(), self._store.namespaces()
        except MooncakeConnectorError as error:
            log_once("agent.metrics.pool", "the pool gave no figures: %s", error, logger=logger)
        else:
            yield from pool_families(stats, spaces)
        yield from tier_families(dataclasses.asdict(report) for report in self._fetches.stats())


def pool_families(stats: StoreStats, spaces: Iterable[SpaceInfo]) -> Iterator[Family]:
    """`POOL` of the registry, from what a store says."""
    for metric in POOL:
        family = _family(metric)
        if metric is EVICTED_AGE:
            within = itertools.accumulate(stats.evicted_ages)
            bounds = [*map(str, metric.buckets), "+Inf"]
            family.add_metric([], list(zip(bounds, within, strict=False)), stats.evicted_unused_s)
        elif metric.figure == "oldest_s":
            for labels, age_s in oldest_pages(spaces).items():
                family.add_metric(labels, age_s)
        elif metric.labels:
            for label, count in getattr(stats, metric.figure).items():
                family.add_metric([label], count)
        else:
            family.add_metric([], getattr(stats, metric.figure))
        yield family


def oldest_pages(spaces: Iterable[SpaceInfo]) -> dict[tuple[str, str], float]:
    """Seconds since the oldest page was stored, by namespace (12 digits) and name of the model."""
    oldest: dict[tuple[str, str], float] = {}
    for space in spaces:
        if space.pages:
            labels = (space.namespace.digest.hex()[:12], space.namespace.model_name)
            oldest[labels] = max(oldest.get(labels, 0.0), space.oldest_s)
    return oldest


def tier_families(reports: Iterable[Mapping[str, Any]]) -> Iterator[Family]:
    """`TIER` of the registry, from the reports of tiers as plain values."""
    known = [{**report, "up": int(report.get("reads") != "open")} for report in reports]
    for metric in TIER:
        family = _family(metric)
        for report in known:
            tier, value = str(report["title"]), report.get(metric.figure)
            if isinstance(value, Mapping):
                for cause, count in value.items():
                    family.add_metric([tier, str(cause)], float(count))
            elif value is not None:
                family.add_metric([tier], float(value))
        if family.samples:
            yield family


def _family(metric: Metric) -> Any:
    return _FAMILIES[metric.kind](PREFIX + metric.name, metric.text + ".", labels=metric.labels)
