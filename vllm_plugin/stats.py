"""Metrics of the connector, through vLLM's own hooks: its periodic log line and its /metrics endpoint.

A stats object holds plain values since the last step; vLLM adds them up over workers and intervals. Their names are in
:mod:`mooncake_connector.metrics.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from mooncake_connector.config.sources import config_of, load_settings, page_tokens_set
from mooncake_connector.config.together import Setting
from mooncake_connector.contain import contained, nothing
from mooncake_connector.metrics.registry import ENGINE_INFO, VLLM, VLLM_PREFIX, Kind, Metric, by_figure
from mooncake_connector.misses import Miss
from store_client.pool_metrics import PoolMetrics

_OWN = by_figure(metric for metric in VLLM if metric is not ENGINE_INFO)
_TABLES = {figure for figure, metric in _OWN.items() if metric.labels}
_LISTS = {figure for figure, metric in _OWN.items() if metric.kind is Kind.HISTOGRAM}


@dataclass
class ConnectorStats(KVConnectorStats):
    """`data`: what is not zero of the registry's figures: sums, of those with a label sums by its value, and of
    histograms each value."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> ConnectorStats | None:
        """What was added since the last call; None where that is nothing."""
        if self.is_empty():
            return None
        taken = ConnectorStats(data=self.data)
        self.reset()
        return taken

    def add(self, figure: str, amount: float = 1) -> None:
        self.data[figure] = self.data.get(figure, 0) + amount

    def fail(self, cause: str, count: int = 1) -> None:
        self._enter("failures", cause, count)

    def fail_each(self, causes: Mapping[str, int]) -> None:
        for cause, count in causes.items():
            self.fail(cause, count)

    def travelled(self, transport: str, nbytes: int) -> None:
        self._enter("transports", transport, nbytes)

    def count_each(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """By figure and label."""
        for figure, by_label in counts.items():
            for label, amount in by_label.items():
                self._enter(figure, label, amount)

    def missed(self, why: Miss, tokens: int) -> None:
        self._enter("miss_tokens", why.value, tokens)

    def took(self, figure: str, seconds: float) -> None:
        """Enter one value of a histogram."""
        self.data.setdefault(figure, []).append(seconds)

    def _enter(self, table: str, key: str, amount: float) -> None:
        entries = self.data.setdefault(table, {})
        entries[key] = entries.get(key, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for figure, amount in other.data.items():
            self._aggregate(figure, amount)
        return self

    @contained(nothing)
    def _aggregate(self, figure: str, amount: Any) -> None:
        """A figure that cannot be added, as of an engine of another version, is left out."""
        if isinstance(amount, Mapping):
            for key, part in amount.items():
                self._enter(figure, key, part)
        elif isinstance(amount, list):
            self.data.setdefault(figure, []).extend(amount)
        else:
            self.add(figure, amount)

    @classmethod
    def for_log(cls, data: Mapping[str, Any]) -> ConnectorStats:
        """What vLLM adds up for its periodic line, which may never be written: without the values of histograms."""
        return cls(data={figure: amount for figure, amount in data.items() if not isinstance(amount, list)})

    @contained(dict)
    def reduce(self) -> dict[str, int | float]:
        data = self.data
        figures: dict[str, int | float] = {
            "pool hit tokens": int(data.get("hit_tokens", 0)),
            "pool queried tokens": int(data.get("queried_tokens", 0)),
        }
        figures.update({f"missed tokens: {why}": int(tokens) for why, tokens in data.get("miss_tokens", {}).items()})
        for kind, kinds in (("load", "loads"), ("save", "saves"), ("fetch", "fetches"), ("send", "sends")):
            nbytes, seconds = data.get(f"{kind}_bytes", 0), data.get(f"{kind}_seconds", 0.0)
            if data.get(kinds):
                figures[kinds] = int(data[kinds])
                figures[f"{kind} MB"] = round(nbytes / 1e6, 3)
                figures[f"{kind} ms (mean)"] = round(1000 * seconds / data[kinds], 3)
        figures.update({f"failed: {cause}": count for cause, count in data.get("failures", {}).items()})
        return figures


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics `vllm:mooncake_connector_*`, one child an engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Gauge | Counter | Histogram], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._metrics = {figure: self._make(metric, labelnames) for figure, metric in _OWN.items()}
        for figure, made in self._metrics.items():
            if not _OWN[figure].labels:  # it is there from the beginning, as 0
                for values in per_engine_labelvalues.values():
                    made.labels(*values)
        settings = _settings(vllm_config)
        if settings is not None:
            self._tell_engine(vllm_config, settings, labelnames)
            self._pool = _pool_metrics(settings)

    @contained(nothing)
    def _tell_engine(self, vllm_config: VllmConfig, settings: list[Setting], labelnames: list[str]) -> None:
        """What `why --url` cannot know from the model's files."""
        told = (str(vllm_config.model_config.dtype).removeprefix("torch."), str(page_tokens_set(settings) or ""))
        gauge = self._gauge_cls(
            name=VLLM_PREFIX + ENGINE_INFO.name, documentation=ENGINE_INFO.text + ".",
            labelnames=[*labelnames, *ENGINE_INFO.labels], multiprocess_mode="mostrecent",
        )  # fmt: skip
        for values in self.per_engine_labelvalues.values():
            gauge.labels(*values, *told).set(1)

    def _make(self, metric: Metric, labelnames: list[str]) -> Any:
        named: dict[str, Any] = {
            "name": VLLM_PREFIX + metric.name,
            "documentation": metric.text + ".",
            "labelnames": [*labelnames, *metric.labels],
        }
        if metric.kind is Kind.HISTOGRAM:
            return self._histogram_cls(**named, buckets=list(metric.buckets))
        return self._counter_cls(**named)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for figure, amount in transfer_stats_data.items():
            if figure in self._metrics:
                self._observe(figure, amount, engine_idx)

    @contained(nothing)
    def _observe(self, figure: str, amount: Any, engine_idx: int) -> None:
        """vLLM's front end ends where this raises."""
        metric, values = self._metrics[figure], self.per_engine_labelvalues[engine_idx]
        if figure in _TABLES:
            for key, part in amount.items():
                metric.labels(*values, key).inc(part)
        elif figure in _LISTS:
            child = metric.labels(*values)
            for seconds in amount:
                child.observe(seconds)
        else:
            metric.labels(*values).inc(amount)


@contained(nothing)
def _settings(vllm_config: VllmConfig) -> list[Setting] | None:
    transfer = vllm_config.kv_transfer_config
    return None if transfer is None else load_settings(transfer.kv_connector_extra_config)


@contained(nothing)
def _pool_metrics(settings: list[Setting]) -> PoolMetrics:
    """vLLM makes its metrics in the process that serves them, which has no store open."""
    return PoolMetrics(config_of(settings))
