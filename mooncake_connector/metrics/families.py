"""What prometheus_client collects of counters and gauges of the registry."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mooncake_connector.metrics.registry import PREFIX, Kind, Metric


def family(metric: Metric) -> CounterMetricFamily | GaugeMetricFamily:
    """Without figures; `add_metric` takes each, behind the values of its labels."""
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return kind(f"{PREFIX}{metric.name}", metric.text, labels=metric.labels)
