"""A client of the agent's HTTP server, and prompts whose pages are in a pool."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys, root_digest
from mooncake_connector.kv.namespace import Namespace
from store_client import EmbeddedStore
from store_client.testing import namespace, put_chain

PATIENT_S = 120.0
WHOLE = Shard(0, 4, 0, 2)
UNIT_NBYTES = 64 * 64 * 2 * 2
"""Of `namespace()`: tokens, head_dim, K and V, bytes."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def answers_at(port: int) -> set[str]:
    """Of this machine's addresses, those at which somebody listens on the port."""
    found = set()
    for address in own_addresses():
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((address, port), PATIENT_S).close()
            found.add(address)
    return found


def own_addresses() -> set[str]:
    """Two of the loopback, which is all that there is without a network, and the one towards others if there is one."""
    found = {"127.0.0.1", "127.0.0.2"}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nothing_is_sent:
        nothing_is_sent.connect(("198.51.100.1", 9))
        found.add(nothing_is_sent.getsockname()[0])
    return found


def prompt(name: int, num_tokens: int) -> list[int]:
    return np.random.default_rng(name).integers(0, 150_000, num_tokens).tolist()


def keys_of(tokens: Sequence[int], of: Namespace, salt: str | None = None) -> list[bytes]:
    return page_keys(tokens, of.page_tokens, root=root_digest(None, salt))


def store_prompt(
    store: EmbeddedStore, tokens: Sequence[int], of: Namespace | None = None, shard: Shard = WHOLE,
    salt: str | None = None,
) -> list[bytes]:  # fmt: skip
    """Put all full pages of a prompt into the pool; their keys."""
    of = of or namespace()
    keys = keys_of(tokens, of, salt)
    put_chain(store.space(of, shard), keys, shard.num_units * UNIT_NBYTES)
    return keys


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    port: int
    token: str = ""
    host: str = "127.0.0.1"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENT_S)
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Any:
        answer = self.ask("POST", path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def register(self, instance_id: str = "a", **fields: Any) -> Any:
        """An instance that publishes no events, unless told otherwise."""
        given = {"type": "vLLM", "modelname": "m", "block_size": 64, "dp_rank": 0, **fields}
        return self.post("/register", instance_id=instance_id, **given)

    def query(self, tokens: Sequence[int], **fields: Any) -> Any:
        return self.post("/query", **{"model": "m", "block_size": 64, "token_ids": list(tokens), **fields})
