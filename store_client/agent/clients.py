"""The clients of a process: one for each pool, shared by the stores that are open on it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from mooncake_connector.config.schema import Config
from store_client.agent.client import Client

_lock = threading.Lock()
_clients: dict[Path, Client] = {}


def client_of(pool: Path, config: Config) -> Client:
    """This process's client for the agent of that pool, to be given back with `give_back`."""
    with _lock:
        client = _clients.get(pool)
        if client is None:
            client = _clients[pool] = Client(pool, config)
        client.users += 1
        return client


def give_back(client: Client) -> None:
    with _lock:
        client.users -= 1
        if client.users > 0:
            return
        if _clients.get(client.pool) is client:
            del _clients[client.pool]
    client.close()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for client in _clients.values():
        client.abandon_in_child()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
