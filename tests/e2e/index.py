"""An index that follows a real server's KV events, and what lies between them: messages that do not arrive."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import zmq

from e2e.pages import PAGE_TOKENS
from e2e.process import free_port, pool_folder
from store_client import EmbeddedStore
from store_client.agent.index.feeds import Feeds
from store_client.agent.index.index import Index
from store_client.agent.index.pages import Pages
from store_client.agent.index.parts import Prompt
from store_client.agent.index.requests import Query, Registration


class Endpoints:
    """Where a server publishes, life after life."""

    def __init__(self) -> None:
        self._events, self._replay = free_port(), free_port()
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in (self._events, self._replay))

    def config(self) -> str:
        """The value of the engines' `--kv-events-config`."""
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{self._events}", "replay_endpoint": f"tcp://*:{self._replay}"}
        return json.dumps(config)


class Indexed:
    """What an index says of one instance, of which it knows nothing but the events: no pool is its own.

    Everything comes through a relay, which loses what it is told to; with `replays` it can be asked for.
    """

    def __init__(self, endpoints: Endpoints, *, engine: str, replays: bool = True) -> None:
        self._stack, self.loses, self.lost = ExitStack(), False, 0
        self.number = -1
        """Of the last message of the engine."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._relayed = f"ipc://{folder}/relayed"
        self._context, self._closed = zmq.Context(), threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._relay, args=(endpoints.events, ready), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        store = self._stack.enter_context(EmbeddedStore(self._stack.enter_context(pool_folder())))
        self._index = Index(Pages(store, lambda *asked: []))
        self._feeds = Feeds(self._index.held)
        instance, _ = self._index.register(
            Registration(
                instance_id="a", modelname="m", block_size=PAGE_TOKENS, type=engine, pool=False,
                endpoint=self._relayed, replay_endpoint=endpoints.replay if replays else "",
            )
        )  # fmt: skip
        assert instance is not None and not self._feeds.follow(instance)

    def of(self, tokens: Sequence[int], medium: str = "longest_matched", *, salt: str | None = None) -> int:
        """Leading tokens that the instance has."""
        query = Query(model="m", block_size=PAGE_TOKENS, token_ids=msgspec.Raw(b"[]"), cache_salt=salt)
        answer = asyncio.run(self._index.query(query, Prompt(np.array(tokens, dtype=np.uint32))))["default"]["a"]
        return int(answer[medium])

    def counted(self, what: str) -> int:
        return self._feeds.counts[what]

    def close(self) -> None:
        self._feeds.close()
        self._closed.set()
        self._thread.join()
        self._context.term()
        self._stack.close()

    def _relay(self, endpoint: str, ready: threading.Event) -> None:
        heard, told = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        for socket in (heard, told):
            socket.set(zmq.LINGER, 0)
        heard.set(zmq.SUBSCRIBE, b"")
        heard.connect(endpoint)
        told.bind(self._relayed)
        ready.set()
        while not self._closed.is_set():
            if heard.poll(20):
                frames = heard.recv_multipart()
                self.number = int.from_bytes(frames[1], "big")
                if self.loses:
                    self.lost += 1
                else:
                    told.send_multipart(frames)
        heard.close()
        told.close()
