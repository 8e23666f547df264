"""What is counted of transfers on SGLang's `/metrics`, and that nothing is without `--enable-metrics`."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from sglang_backend.metrics import TransferMetrics
from transfer.protocol.incoming import Incoming
from transfer.protocol.orders import Ending
from transfer.protocol.outgoing import Outgoing

COUNTED = [
    ("transfers_total", {"operation": "send"}),
    ("transfers_total", {"operation": "fetch"}),
    ("transfer_bytes_total", {"operation": "send"}),
    ("transfer_bytes_total", {"operation": "fetch"}),
    ("transfer_seconds_total", {"operation": "send"}),
    ("transfer_seconds_total", {"operation": "fetch"}),
    ("fetch_duration_seconds_count", {}),
    ("fetch_duration_seconds_sum", {}),
    ("transport_bytes_total", {"transport": "cma"}),
    ("failures_total", {"operation": "send", "cause": "expired"}),
    ("failures_total", {"operation": "fetch", "cause": "failed"}),
    ("failures_total", {"operation": "fetch", "cause": "refused"}),
]


def counts() -> list[float]:
    found = (REGISTRY.get_sample_value(f"mooncake_connector_{name}", labels) for name, labels in COUNTED)
    return [value or 0.0 for value in found]


def added(metrics: TransferMetrics, *transfers: Outgoing | Incoming) -> list[float]:
    before = counts()
    for transfer in transfers:
        metrics.ended(transfer)
    metrics.failed("fetch", "refused")
    return [after - value for after, value in zip(counts(), before, strict=True)]


SENT = Outgoing("a", ending=Ending.DONE, nbytes=100, seconds=0.5, transports={"cma"})
EXPIRED = Outgoing("b", ending=Ending.EXPIRED, cause="no consumer", seconds=30.0)
FETCHED = Incoming("a", ending=Ending.DONE, nbytes=100, seconds=0.25)
FAILED = Incoming("c", ending=Ending.FAILED, nbytes=40, seconds=1.0)
CANCELLED = Incoming("d", ending=Ending.CANCELLED, seconds=1.0)


def test_each_transfer_is_counted_once_and_an_abort_is_no_failure():
    found = added(TransferMetrics(enabled=True), SENT, EXPIRED, FETCHED, FAILED, CANCELLED)
    assert found == pytest.approx([2, 3, 100, 140, 30.5, 2.25, 3, 2.25, 100, 1, 1, 1])


def test_without_metrics_nothing_is_counted():
    assert not any(added(TransferMetrics(enabled=False), SENT, EXPIRED, FETCHED, FAILED))


def test_what_transports_count_is_added_by_figure_and_label():
    def counted() -> list[float]:
        names = [("rail_bytes", "mlx5_0:1"), ("rail_bytes", "mlx5_1:1"), ("rail_failures", "mlx5_0:1")]
        found = (REGISTRY.get_sample_value(f"mooncake_connector_{name}_total", {"rail": rail}) for name, rail in names)
        return [value or 0.0 for value in found]

    counts = {"rail_bytes": {"mlx5_0:1": 5, "mlx5_1:1": 2}, "rail_failures": {"mlx5_0:1": 1}}
    before = counted()
    TransferMetrics(enabled=False).count_each(counts)
    assert counted() == before
    for _ in range(2):
        TransferMetrics(enabled=True).count_each(counts)
    assert [after - value for after, value in zip(counted(), before, strict=True)] == [10, 4, 2]
