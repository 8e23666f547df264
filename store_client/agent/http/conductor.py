"""The paths of Mooncake's Conductor, answered by the index."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from mooncake_connector import __version__
from mooncake_connector.metrics.families import family
from mooncake_connector.metrics.registry import INDEX
from store_client.agent.http.app import App, Request, Response, Route
from store_client.agent.index.feeds import Feeds
from store_client.agent.index.index import Index
from store_client.agent.index.requests import QueryByHash, Registration, Unregistration, decode, decode_query

_MAX_REGISTRATION_NBYTES = 64 << 10
"""It is kept as it comes."""


class Conductor:
    """Args:
    registry: what `/metrics` shows.
    """

    def __init__(self, index: Index, registry: CollectorRegistry, feeds: Feeds) -> None:
        self._index, self._registry, self._feeds = index, registry, feeds

    def routes(self) -> Mapping[str, Mapping[str, Route]]:
        return {
            "/register": {"POST": Route(self._register, max_body_nbytes=_MAX_REGISTRATION_NBYTES)},
            "/unregister": {"POST": Route(self._unregister, max_body_nbytes=_MAX_REGISTRATION_NBYTES)},
            "/query": {"POST": Route(self._query)},
            "/query_by_hash": {"POST": Route(self._query_by_hash)},
            "/services": {"GET": Route(self._services)},
            "/health": {"GET": Route(self._health)},
            "/metrics": {"GET": Route(self._metrics)},
        }

    async def _register(self, request: Request) -> Response:
        registration = decode(request.body, Registration)
        instance, remark = self._index.register(registration)
        if instance is not None:
            remark = "; ".join(filter(None, (remark, self._feeds.follow(instance))))
        answer = {"status": "registered successfully", "instance_id": registration.instance_id}
        return Response({**answer, "remark": remark} if remark else answer)

    async def _unregister(self, request: Request) -> Response:
        instance = self._index.unregister(decode(request.body, Unregistration))
        self._feeds.unfollow(instance)
        removed = [instance.registered.name]
        return Response({"status": "unregistered successfully", "removed_instances": removed})

    async def _query(self, request: Request) -> Response:
        return Response(await self._index.query(*decode_query(request.body, self._index.parts)))

    async def _query_by_hash(self, request: Request) -> Response:
        return Response(await self._index.query_by_hash(decode(request.body, QueryByHash)))

    async def _services(self, request: Request) -> Response:
        services = self._index.services()
        return Response({"count": len(services), "services": services})

    async def _health(self, request: Request) -> Response:
        return Response({"status": "ok", "version": __version__, "instances": len(self._index.instances)})

    async def _metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(generate_latest, self._registry)  # the pool's figures take a look at every page
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


class Figures(Collector):
    """What the index and the server have done, for Prometheus."""

    def __init__(self, index: Index, app: App, feeds: Feeds) -> None:
        self._index, self._app, self._feeds = index, app, feeds

    def collect(self) -> Iterator[Metric]:
        figures: dict[str, Mapping[tuple[str, ...], float]] = {
            "instances": {(): len(self._index.instances)},
            "blocks": {(): self._index.held.num_blocks},
            "without_namespace": {(): self._index.counts["without_namespace"]},
            "events": {(what,): count for what, count in self._feeds.counts.copy().items()},
            "answers": {
                (path or "unknown", str(status)): count for (path, status), count in self._app.counts.copy().items()
            },
        }
        for metric in INDEX:
            found = family(metric)
            for labels, value in figures[metric.figure].items():
                found.add_metric(labels, value)
            yield found
