"""From configuration to the agent's HTTP server, with everything that it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from mooncake_connector.config.schema import Config
from mooncake_connector.config.secret import read_secret
from store_client.agent.http.app import App
from store_client.agent.http.conductor import Conductor, Figures
from store_client.agent.http.pages import Pages as HttpPages
from store_client.agent.http.server import HttpServer
from store_client.agent.index.feeds import Feeds
from store_client.agent.index.index import Index
from store_client.agent.index.pages import Pages
from store_client.agent.wish import Fetches
from store_client.embedded import EmbeddedStore


@contextlib.contextmanager
def serving(config: Config, store: EmbeddedStore, fetches: Fetches, metrics: Collector) -> Iterator[None]:
    """Serve while it is entered, where the configuration has a port for it.

    `metrics` are the host's. Raises ConfigError for a token that cannot be used: nothing is served without it then.
    """
    if not config.agent_http_port:
        yield
        return
    file = config.agent_http_token_file
    token = b"" if file is None else read_secret(file, "agent_http_token_file")
    registry = CollectorRegistry()
    index = Index(Pages(store, fetches.holds))
    feeds = Feeds(index.held)
    app = App({**Conductor(index, registry, feeds).routes(), **HttpPages(store).routes()}, token)
    registry.register(metrics)
    registry.register(Figures(index, app, feeds))
    with contextlib.closing(feeds), HttpServer(config.agent_http_host, config.agent_http_port, app):
        yield
