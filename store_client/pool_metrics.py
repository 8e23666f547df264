"""The pool's and its tiers' metrics on an engine's `/metrics`, where no agent serves them.

They are figures of a host, so of all its engines one shows them: who holds a lock on the pool's description. When its
process ends another one goes on, so a sum over engines is right at any time. A thread looks at the pool every few
seconds; engines' own threads have no part in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from mooncake_connector.config.schema import Config
from mooncake_connector.contain import contained, nothing
from mooncake_connector.errors import PoolError
from mooncake_connector.metrics.registry import EVICTED_AGE, POOL, PREFIX, TIER, Kind, Metric
from store_client.agent.sockets import keep_from_children, release
from store_client.agent.visit import ask_report
from store_client.base import StoreStats
from store_client.embedded.faults import start_thread
from store_client.embedded.folder import DESCRIPTION, usual_places
from store_client.embedded.glance import Glances
from store_client.embedded.locks import open_file

_EVERY_S = 5.0
_NOT_SHOWN = ("oldest_s",)
"""It takes a look at every page of the pool: the agent alone shows it."""


def agent_serves(config: Config) -> bool:
    """Whether the pool's agent serves the same metrics by these settings; one that has settings of its own says so."""
    return bool(config.agent_http_port or (config.tiers and config.agent_metrics_port))


class PoolMetrics:
    """Keeps them current as long as somebody refers to it; begins nothing where it is not needed."""

    def __init__(self, config: Config, *, every_s: float = _EVERY_S, registry: CollectorRegistry = REGISTRY) -> None:
        self._config, self._registry = config, registry
        self._glances: Glances | None = None
        self._held, self._refreshing = _Held(registry), threading.Lock()
        self._counted: dict[tuple[str, ...], float] = {}
        self._gauges: dict[tuple[str, ...], Any] = {}
        self._pool_id, self._agent_pid = "", 0
        if config.prefix_reuse and not agent_serves(config):
            # The collector of cycles may be at work inside the registry's lock, or ours: there nothing may wait for
            # either. To put something into this queue is allowed anywhere.
            ended = SimpleQueue[None]()
            weakref.finalize(self, ended.put, None)
            start_thread("pool-metrics", _go_on, weakref.ref(self), self._held, ended, every_s)

    @contained(nothing)
    def refresh(self) -> None:
        """Look now, and show it if this process is the one that does."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        pool = self._config.pool or next((place for place in usual_places() if (place / DESCRIPTION).exists()), None)
        if pool is None or not self._held.lock(pool):
            self._show_nothing()
            return
        report: dict[str, Any] | None = None
        with contextlib.suppress(PoolError):  # the agent is stopped, or of another version: it serves nothing now
            report = ask_report(pool)
        if report is not None and report.get("serves_metrics"):
            self._show_nothing()
            return
        if self._glances is None or self._glances.pool != pool:
            self._glances = Glances(pool)
        try:
            pool_id, stats = self._glances.look()
        except PoolError:  # it is being removed or made anew; an engine that uses it says what is wrong
            self._show_nothing()
            return
        if pool_id != self._pool_id:
            self._pool_id = pool_id
            self._forget(POOL)
        self._show_pool(stats)
        if report is not None:
            self._show_tiers(report)

    def _show_pool(self, stats: StoreStats) -> None:
        for metric in POOL:
            if metric is EVICTED_AGE:
                self._show_ages(stats)
            elif metric.labels and metric.figure not in _NOT_SHOWN:
                for cause, count in getattr(stats, metric.figure).items():
                    self._show(metric, count, cause)
            elif not metric.labels:
                self._show(metric, getattr(stats, metric.figure))

    def _show_ages(self, stats: StoreStats) -> None:
        """Counts come in hundreds at a time, for which prometheus_client has no public method."""
        histogram = self._held.metric(EVICTED_AGE)
        for number, (bucket, count) in enumerate(zip(histogram._buckets, stats.evicted_ages, strict=True)):
            bucket.inc(self._added(count, EVICTED_AGE.name, str(number)))
        histogram._sum.inc(self._added(stats.evicted_unused_s, EVICTED_AGE.name, "sum"))

    def _show_tiers(self, report: Mapping[str, Any]) -> None:
        if report.get("pid") != self._agent_pid:  # one that was started again counts anew
            self._agent_pid = report.get("pid", 0)
            self._forget(TIER)
        for tier in report.get("tiers", ()):
            self._show_tier({**tier, "up": int(tier.get("reads") != "open")})

    def _show_tier(self, tier: Mapping[str, Any]) -> None:
        for metric in TIER:
            value = tier.get(metric.figure)
            if isinstance(value, Mapping):
                for cause, count in value.items():
                    self._show(metric, count, str(tier["title"]), str(cause))
            elif value is not None:
                self._show(metric, value, str(tier["title"]))

    def _show(self, metric: Metric, value: float, *labels: str) -> None:
        made = self._held.metric(metric)
        child, key = made.labels(*labels) if labels else made, (metric.name, *labels)
        if metric.kind is Kind.GAUGE:
            self._gauges[key] = child
            child.set(value)
        else:
            child.inc(self._added(value, *key))

    def _added(self, value: float, *key: str) -> float:
        """What a counter, which never falls, has counted since this was asked last."""
        former = self._counted.get(key, 0)
        self._counted[key] = max(value, former)
        return max(0, value - former)

    def _forget(self, metrics: Iterable[Metric]) -> None:
        names = {metric.name for metric in metrics}
        self._counted = {key: value for key, value in self._counted.items() if key[0] not in names}

    def _show_nothing(self) -> None:
        """Another process shows the pool from now on, or there is none: what is left here must not be added to that."""
        for gauge in self._gauges.values():
            gauge.set(0)


def _go_on(reference: weakref.ref[PoolMetrics], held: _Held, ended: SimpleQueue[None], every_s: float) -> None:
    while (metrics := reference()) is not None:
        metrics.refresh()
        del metrics
        with contextlib.suppress(Empty):
            ended.get(timeout=every_s)
    held.let_go()


class _Held:
    """The lock that makes a process the one that shows a pool, and the metrics that it has made for that."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._changing = threading.Lock()
        self._fd = -1
        self.made: dict[Metric, Any] = {}

    def metric(self, metric: Metric) -> Any:
        """Made when it is first asked for: a process that shows nothing has none."""
        if metric not in self.made:
            more: dict[str, Any] = {}
            if metric.kind is Kind.HISTOGRAM:
                more = {"buckets": metric.buckets}
            elif metric.kind is Kind.GAUGE:
                more = {"multiprocess_mode": "mostrecent"}
            kind: Any = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}[metric.kind]
            self.made[metric] = kind(
                PREFIX + metric.name, metric.text + ".", metric.labels, registry=self._registry, **more
            )
        return self.made[metric]

    def lock(self, pool: Path) -> bool:
        """Whether this process has it. A pool that is made anew has a new description, and a new lock with it."""
        with self._changing:
            if self._fd >= 0 and _is_at(self._fd, pool / DESCRIPTION):
                return True
            self._close()
            try:
                fd = keep_from_children(open_file(pool / DESCRIPTION, os.O_RDONLY))
            except OSError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._fd = fd
            except OSError:
                release(fd)
                os.close(fd)
                return False
            return _is_at(fd, pool / DESCRIPTION)

    def let_go(self) -> None:
        with self._changing:
            self._close()
        for made in self.made.values():
            with contextlib.suppress(KeyError):
                self._registry.unregister(made)

    def _close(self) -> None:
        if self._fd >= 0:
            release(self._fd)
            os.close(self._fd)
            self._fd = -1


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False
