"""What both backends count, on SGLang's `/metrics`; the storage backend also through SGLang's storage metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from sglang.srt.observability.metrics_collector import StorageMetrics

from mooncake_connector.contain import contained, nothing
from mooncake_connector.metrics.registry import PREFIX, SGLANG, Kind, Metric
from mooncake_connector.misses import Miss
from sglang_backend.speed import prefill_speed
from transfer.protocol.orders import Ending
from transfer.protocol.outgoing import Outgoing

if TYPE_CHECKING:
    from transfer.protocol.incoming import Incoming

_GIB = 1 << 30


@cache
def _metrics() -> dict[str, Any]:
    """Made once in a process: a backend that is attached again goes on counting."""
    return {metric.figure: _made(metric) for metric in SGLANG}


def _made(metric: Metric) -> Counter | Histogram:
    name, text = PREFIX + metric.name, metric.text + "."
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(name, text, metric.labels, buckets=metric.buckets)
    return Counter(name, text, metric.labels)


class Metrics:
    """Counts of one backend. May be used from any thread.

    Args:
        enabled: whether SGLang wants storage metrics (`--enable-metrics`); nothing is kept otherwise.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._since = StorageMetrics()
        self._repeating = threading.local()

    @contextmanager
    def repeating(self, on: bool) -> Iterator[None]:
        """Where `on`, what this thread looks up meanwhile was counted before."""
        self._repeating.on = on
        try:
            yield
        finally:
            self._repeating.on = False

    @property
    def repeats(self) -> bool:
        return getattr(self._repeating, "on", False)

    @contained(nothing)
    def moved(self, operation: str, pages: int, page_nbytes: int, seconds: float) -> None:
        """Count pages that were loaded (`operation` "load") or saved ("save")."""
        if not self._enabled or pages == 0:
            return
        metrics, nbytes = _metrics(), pages * page_nbytes
        metrics["pages"].labels(operation).inc(pages)
        metrics["bytes"].labels(operation).inc(nbytes)
        metrics["seconds"].labels(operation).inc(seconds)
        metrics[f"{operation}_duration_seconds"].observe(seconds)
        with self._lock:
            if operation == "load":
                self._since.prefetch_pgs.append(pages)
                self._since.prefetch_bandwidth.append(nbytes / _GIB / max(seconds, 1e-9))
            else:
                self._since.backup_pgs.append(pages)
                self._since.backup_bandwidth.append(nbytes / _GIB / max(seconds, 1e-9))

    @contained(nothing)
    def failed(self, operation: str, cause: str, count: int = 1) -> None:
        if self._enabled:
            _metrics()["failures"].labels(operation, cause).inc(count)

    @contained(nothing)
    def hit(self, tokens: int) -> None:
        """Count tokens of prompts that were loaded."""
        if self._enabled and tokens:
            _metrics()["queried_tokens"].inc(tokens)
            _metrics()["hit_tokens"].inc(tokens)
            if prefill_speed.tokens_s:
                _metrics()["prefill_seconds_saved"].inc(tokens / prefill_speed.tokens_s)

    @contained(nothing)
    def missed(self, why: Miss, tokens: int) -> None:
        """Count tokens of prompts that were not there, or did not come."""
        if self._enabled and not self.repeats and tokens:
            _metrics()["queried_tokens"].inc(tokens)
            _metrics()["miss_tokens"].labels(why.value).inc(tokens)

    @contained(nothing)
    def evicted(self, *, unused_s: float, reuse_s: float) -> None:
        """Count a prompt whose first missing page had been evicted after `unused_s`, last used `reuse_s` ago."""
        if self._enabled and not self.repeats:
            _metrics()["evicted_requests"].inc()
            _metrics()["evicted_unused_seconds"].inc(unused_s)
            _metrics()["evicted_reuse_seconds"].inc(reuse_s)

    def promised(self, pages: int) -> None:
        """Count pages that tiers are bringing."""
        self._outcome("promised", pages)

    def came(self, landed: int, lost: int) -> None:
        """Count what became of such pages."""
        self._outcome("landed", landed)
        self._outcome("lost", lost)

    @contained(nothing)
    def _outcome(self, outcome: str, pages: int) -> None:
        if self._enabled and pages:
            _metrics()["tier_pages"].labels(outcome).inc(pages)

    @contained(nothing)
    def waited(self, seconds: float) -> None:
        """Count a lookup that waited for what tiers say."""
        if self._enabled:
            _metrics()["tier_waits"].inc()
            _metrics()["tier_wait_seconds"].inc(seconds)

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

    @contained(nothing)
    def ended(self, transfer: Outgoing | Incoming) -> None:
        if not self._enabled:
            return
        metrics = _metrics()
        operation = "send" if isinstance(transfer, Outgoing) else "fetch"
        metrics["transfers"].labels(operation).inc()
        metrics["transfer_bytes"].labels(operation).inc(transfer.nbytes)
        metrics["transfer_seconds"].labels(operation).inc(transfer.seconds)
        if operation == "fetch":
            metrics["fetch_duration_seconds"].observe(transfer.seconds)
        if transfer.transport:
            metrics["transport_bytes"].labels(transfer.transport).inc(transfer.nbytes)
        if transfer.ending in (Ending.FAILED, Ending.EXPIRED):
            self.failed(operation, transfer.ending.value)

    @contained(nothing)
    def count_each(self, counts: Mapping[str, Mapping[str, int]]) -> None:
        """By figure and label."""
        if self._enabled:
            for figure, by_label in counts.items():
                for label, amount in by_label.items():
                    _metrics()[figure].labels(label).inc(amount)

    @contained(nothing)
    def failed(self, operation: str, cause: str) -> None:
        if self._enabled:
            _metrics()["failures"].labels(operation, cause).inc()
