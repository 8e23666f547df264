"""What the backend counts: through SGLang's storage metrics, and as counters of its own on the same `/metrics`."""

from __future__ import annotations

import threading
from functools import cache

from prometheus_client import Counter
from sglang.srt.observability.metrics_collector import StorageMetrics

_GIB = 1 << 30


@cache
def _counters() -> dict[str, Counter]:
    """Made once in a process: a backend that is attached again goes on counting."""
    return {
        "pages": Counter("mooncake_connector_pages_total", "Pages loaded from or saved to the pool", ["operation"]),
        "bytes": Counter("mooncake_connector_bytes_total", "Bytes moved from or to the pool", ["operation"]),
        "seconds": Counter("mooncake_connector_seconds_total", "Seconds spent moving pages", ["operation"]),
        "failures": Counter("mooncake_connector_failures_total", "Operations that failed", ["operation", "cause"]),
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

    def failed(self, operation: str, cause: str) -> None:
        if self._enabled:
            _counters()["failures"].labels(operation, cause).inc()

    def drain(self) -> StorageMetrics:
        """What was moved since the last call."""
        with self._lock:
            since, self._since = self._since, StorageMetrics()
        return since
