"""The built-in router's `/metrics`: what it sent where, what that has under way, and what became of asking an index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mooncake_connector.deploy.asgi import Message, Receive, Send
from mooncake_connector.deploy.instances import Group
from mooncake_connector.deploy.prefixes import Prefixes
from mooncake_connector.metrics.families import family
from mooncake_connector.metrics.registry import ROUTER, ROUTER_INDEX


class Measured:
    """An ASGI application: `/metrics`, and another one for everything else."""

    def __init__(self, proxy: Any, groups: Mapping[str, Group], prefixes: Prefixes | None) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Figures(groups, prefixes))
        self._proxy, self._metrics = proxy, make_asgi_app(registry)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"] == "/metrics"
        await (self._metrics if is_ours else self._proxy)(scope, receive, send)


class Figures(Collector):
    """Args:
    groups: by their role.
    """

    def __init__(self, groups: Mapping[str, Group], prefixes: Prefixes | None) -> None:
        self._groups, self._prefixes = groups, prefixes

    def collect(self) -> Iterator[Metric]:
        for metric in ROUTER:
            found = family(metric)
            for role, group in self._groups.items():
                for one in group.instances:
                    found.add_metric([role, one.url], getattr(one, metric.figure))
            yield found
        asked = family(ROUTER_INDEX)
        for outcome, count in (self._prefixes.outcomes if self._prefixes is not None else {}).items():
            asked.add_metric([outcome], count)
        yield asked
