"""Metrics of the connector, through vLLM's own hooks: its periodic log line and its /metrics endpoint.

A stats object holds plain sums since the last step; vLLM adds them up over workers and intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

SUMS = {
    "hit_tokens": "Prompt tokens that were loaded from the pool instead of computed",
    "tier_hit_tokens": "Of hit_tokens, those that the pool did not have when the request arrived: tiers brought them",
    "tier_promised_pages": "Pages that tiers were bringing when a load was planned, by each rank",
    "tier_landed_pages": "Of tier_promised_pages, those that came and were loaded",
    "tier_lost_pages": "Of tier_promised_pages, those that did not come in time and were computed",
    "tier_waits": "Requests that were put aside until tiers had said which of their pages they have",
    "tier_wait_seconds": "Seconds for which requests were put aside for that",
    "tier_unheard": "Requests that were planned before tiers had said so",
    "queried_tokens": "Prompt tokens beyond the local prefix cache that were looked up in the pool",
    "load_bytes": "Bytes loaded from the pool into KV blocks",
    "load_seconds": "Seconds from the submission of a load to its end",
    "loads": "Loads that ended, well or not",
    "save_bytes": "Bytes stored in the pool",
    "save_seconds": "Seconds from the submission of a save to its end",
    "saves": "Saves that ended, well or not",
    "saved_pages": "Pages newly stored in the pool",
    "overtaken_pages": "Pages that were not stored, since vLLM used their blocks for another request first",
    "fetched_tokens": "Prompt tokens that a prefill instance computed for this one",
    "fetch_bytes": "Bytes of KV that arrived from prefill instances",
    "fetch_seconds": "Seconds from the announcement of a transfer to its end",
    "fetches": "Transfers from prefill instances that ended, well or not",
    "send_bytes": "Bytes of KV that were sent to decode instances",
    "send_seconds": "Seconds from the beginning of a request that is given away to its release",
    "sends": "Transfers to decode instances that ended, well or not",
}
"""Figure -> documentation. Failures are a table of their own, by cause, and so are bytes sent by transport."""
_TABLES = ("failures", "transports")


@dataclass
class ConnectorStats(KVConnectorStats):
    """`data`: the sums of :data:`SUMS` that are not zero, `failures` by cause, bytes sent by `transports`."""

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

    def _enter(self, table: str, key: str, amount: float) -> None:
        entries = self.data.setdefault(table, {})
        entries[key] = entries.get(key, 0) + amount

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for figure, amount in other.data.items():
            if figure in _TABLES:
                for key, part in amount.items():
                    self._enter(figure, key, part)
            else:
                self.add(figure, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        data = self.data
        figures: dict[str, int | float] = {
            "pool hit tokens": int(data.get("hit_tokens", 0)),
            "pool queried tokens": int(data.get("queried_tokens", 0)),
        }
        for kind, kinds in (("load", "loads"), ("save", "saves"), ("fetch", "fetches"), ("send", "sends")):
            nbytes, seconds = data.get(f"{kind}_bytes", 0), data.get(f"{kind}_seconds", 0.0)
            if data.get(kinds):
                figures[kinds] = int(data[kinds])
                figures[f"{kind} MB"] = round(nbytes / 1e6, 3)
                figures[f"{kind} ms (mean)"] = round(1000 * seconds / data[kinds], 3)
        figures.update({f"failed: {cause}": count for cause, count in data.get("failures", {}).items()})
        return figures


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters `vllm:mooncake_connector_*`, one child an engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Gauge | Counter | Histogram], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._sums = {
            figure: create_metric_per_engine(
                self._counter_cls(name=_name(figure), documentation=text + ".", labelnames=labelnames),
                per_engine_labelvalues,
            )
            for figure, text in SUMS.items()
        }
        self._failures = self._counter_cls(
            name=_name("failures"),
            documentation="Loads, saves and transfers that failed, and what the agent did not do, by cause; each "
            "was answered by recomputation.",
            labelnames=[*labelnames, "cause"],
        )
        self._transports = self._counter_cls(
            name=_name("transport_bytes"),
            documentation="Bytes of KV that were sent to decode instances, by transport.",
            labelnames=[*labelnames, "transport"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for figure, amount in transfer_stats_data.items():
            if figure in self._sums:
                self._sums[figure][engine_idx].inc(amount)
        for cause, count in transfer_stats_data.get("failures", {}).items():
            self._failures.labels(*self.per_engine_labelvalues[engine_idx], cause).inc(count)
        for transport, nbytes in transfer_stats_data.get("transports", {}).items():
            self._transports.labels(*self.per_engine_labelvalues[engine_idx], transport).inc(nbytes)


def _name(figure: str) -> str:
    return f"vllm:mooncake_connector_{figure}"
