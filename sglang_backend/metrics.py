"""What both backends count, on SGLang's `/metrics`; the storage backend also through SGLang's storage metrics."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import Counter
from sglang.srt.observability.metrics_collector import StorageMetrics

from transfer.protocol.orders import Ending
from transfer.protocol.outgoing import Outgoing

if TYPE_CHECKING:
    from transfer.protocol.incoming import Incoming

_GIB = 1 << 30


@cache
def _counters() -> dict[str, Counter]:
    """Made once in a process: a backend that is attached again goes on counting."""
    return {
        "pages": Counter("mooncake_connector_pages_total", "Pages loaded from or saved to the pool", ["operation"]),
        "bytes": Counter("mooncake_connector_bytes_total", "Bytes moved from or to the pool", ["operation"]),
        "seconds": Counter("mooncake_connector_seconds_total", "Seconds spent moving pages", ["operation"]),
        "failures": Counter("mooncake_connector_failures_total", "Operations that failed", ["operation", "cause"]),
        "tier_pages": Counter(
            "mooncake_connector_tier_pages_total",
            "Pages that tiers were bringing when SGLang looked for them (promised), of these those that were loaded "
            "(landed) and those that it then asked for in vain (lost)",
            ["outcome"],
        ),
        "tier_waits": Counter(
            "mooncake_connector_tier_waits_total", "Lookups that waited until tiers had said which pages they have"
        ),
        "tier_wait_seconds": Counter("mooncake_connector_tier_wait_seconds_total", "Seconds that they waited"),
        "transfers": Counter(
            "mooncake_connector_transfers_total", "Requests' KV sent or fetched, well or not", ["operation"]
        ),
        "transfer_bytes": Counter("mooncake_connector_transfer_bytes_total", "KV sent or fetched", ["operation"]),
        "transfer_seconds": Counter(
            "mooncake_connector_transfer_seconds_total", "Seconds from a request's beginning to its end", ["operation"]
        ),
        "transport_bytes": Counter("mooncake_connector_transport_bytes_total", "KV sent, by transport", ["transport"]),
    }


class Metrics:
    """Counts of one backend. May be used from any thread.

    Args:
        enabled: whether SGLang wants storage metrics (`--enable-metrics`); nothing is kept otherwise.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._since = StorageMetrics()

    def moved(self, operation: str, pages: int, page_nbytes: int, seconds: float) -> None:
        """Count pages that were loaded (`operation` "load") or saved ("save")."""
        if not self._enabled or pages == 0:
            return
        counters, nbytes = _counters(), pages * page_nbytes
        counters["pages"].labels(operation).inc(pages)
        counters["bytes"].labels(operation).inc(nbytes)
        counters["seconds"].labels(operation).inc(seconds)
        with self._lock:
            if operation == "load":
                self._since.prefetch_pgs.append(pages)
                self._since.prefetch_bandwidth.append(nbytes / _GIB / max(seconds, 1e-9))
            else:
                self._since.backup_pgs.append(pages)
                self._since.backup_bandwidth.append(nbytes / _GIB / max(seconds, 1e-9))

    def failed(self, operation: str, cause: str, count: int = 1) -> None:
        if self._enabled:
            _counters()["failures"].labels(operation, cause).inc(count)

    def promised(self, pages: int) -> None:
        """Count pages that tiers are bringing."""
        self._outcome("promised", pages)

    def came(self, landed: int, lost: int) -> None:
        """Count what became of such pages."""
        self._outcome("landed", landed)
        self._outcome("lost", lost)

    def _outcome(self, outcome: str, pages: int) -> None:
        if self._enabled and pages:
            _counters()["tier_pages"].labels(outcome).inc(pages)

    def waited(self, seconds: float) -> None:
        """Count a lookup that waited for what tiers say."""
        if self._enabled:
            _counters()["tier_waits"].inc()
            _counters()["tier_wait_seconds"].inc(seconds)

    def drain(self) -> StorageMetrics:
        """What was moved since the last call."""
        with self._lock:
            since, self._since = self._since, StorageMetrics()
        return since


class TransferMetrics:
    """Counts of one rank of a prefill ("send") or a decode instance ("fetch").

    Args:
        enabled: whether SGLang has metrics (`--enable-metrics`); nothing is counted otherwise.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def ended(self, transfer: Outgoing | Incoming) -> None:
        if not self._enabled:
            return
        counters = _counters()
        operation = "send" if isinstance(transfer, Outgoing) else "fetch"
        counters["transfers"].labels(operation).inc()
        counters["transfer_bytes"].labels(operation).inc(transfer.nbytes)
        counters["transfer_seconds"].labels(operation).inc(transfer.seconds)
        if transfer.transport:
            counters["transport_bytes"].labels(transfer.transport).inc(transfer.nbytes)
        if transfer.ending in (Ending.FAILED, Ending.EXPIRED):
            self.failed(operation, transfer.ending.value)

    def failed(self, operation: str, cause: str) -> None:
        if self._enabled:
            _counters()["failures"].labels(operation, cause).inc()
