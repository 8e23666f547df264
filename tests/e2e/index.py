"""An index that follows a real server's KV events, what lies between them (messages that do not arrive), and how it is
held against what the server finds."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import zmq
from agent.asking import Client
from prometheus_client.parser import text_string_to_metric_families

from e2e.hosts import Agent
from e2e.pages import PAGE_TOKENS, wait_for
from e2e.process import free_port, pool_folder
from e2e.questions import draw_tokens
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

    def config(self, **more: object) -> str:
        """The value of the engines' `--kv-events-config`."""
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{self._events}", "replay_endpoint": f"tcp://*:{self._replay}"}
        return json.dumps({**config, **more})


class Relay:
    """What an engine publishes, at an endpoint of its own; it loses what it is told to."""

    def __init__(self, endpoint: str) -> None:
        self.loses, self.lost = False, 0
        self.number = -1
        """Of the last message of the engine."""
        self._folder = tempfile.TemporaryDirectory()
        self.endpoint = f"ipc://{self._folder.name}/relayed"
        self._context, self._closed = zmq.Context(), threading.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._relay, args=(endpoint, ready), daemon=True)
        self._thread.start()
        assert ready.wait(60)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._context.term()
        self._folder.cleanup()

    def _relay(self, endpoint: str, ready: threading.Event) -> None:
        heard, told = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        for socket in (heard, told):
            socket.set(zmq.LINGER, 0)
        heard.set(zmq.SUBSCRIBE, b"")
        heard.connect(endpoint)
        told.bind(self.endpoint)
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


class Says(Protocol):
    """What an index says of one instance."""

    @property
    def relay(self) -> Relay: ...

    def of(self, tokens: Sequence[int], medium: str = "longest_matched", *, salt: str | None = None) -> int:
        """Leading tokens that the instance has."""

    def counted(self, what: str) -> int: ...


class Indexed:
    """An index of one instance, of which it knows nothing but the events: no pool is its own.

    Everything comes through a relay; what that loses can be asked for with `replays`.
    """

    def __init__(self, endpoints: Endpoints, *, engine: str, replays: bool = True) -> None:
        self._stack, self.relay = ExitStack(), Relay(endpoints.events)
        self._stack.callback(self.relay.close)
        store = self._stack.enter_context(EmbeddedStore(self._stack.enter_context(pool_folder())))
        self._index = Index(Pages(store, lambda *asked: []))
        self._feeds = Feeds(self._index.held)
        instance, _ = self._index.register(
            Registration(
                instance_id="a", modelname="m", block_size=PAGE_TOKENS, type=engine, pool=False,
                endpoint=self.relay.endpoint, replay_endpoint=endpoints.replay if replays else "",
            )
        )  # fmt: skip
        assert instance is not None and not self._feeds.follow(instance)

    def of(self, tokens: Sequence[int], medium: str = "longest_matched", *, salt: str | None = None) -> int:
        query = Query(model="m", block_size=PAGE_TOKENS, token_ids=msgspec.Raw(b"[]"), cache_salt=salt)
        answer = asyncio.run(self._index.query(query, Prompt(np.array(tokens, dtype=np.uint32))))["default"]["a"]
        return int(answer[medium])

    def counted(self, what: str) -> int:
        return self._feeds.counts[what]

    def close(self) -> None:
        self._feeds.close()
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Asked:
    """An agent's index, over HTTP. `counted` is of all instances that the agent has."""

    client: Client
    model: str
    name: str
    relay: Relay

    def of(self, tokens: Sequence[int], medium: str = "longest_matched", *, salt: str | None = None) -> int:
        answer = self.client.query(tokens, model=self.model, cache_salt=salt)["default"][self.name]
        return int(answer[medium])

    def counted(self, what: str) -> int:
        text, name = self.client.ask("GET", "/metrics").body.decode(), "mooncake_connector_index_events_total"
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(int(one.value) for one in samples if one.name == name and what in one.labels.values())


def http(folder: Path, host: str = "127.0.0.1") -> tuple[Client, dict[str, str]]:
    """A client that has the token, which is in `folder`, and the environment of the agent that it asks."""
    client, file = Client(free_port(), "a token of the test", host), folder / "token"
    file.write_text(client.token)
    file.chmod(0o600)
    settings = {"port": str(client.port), "host": host, "token_file": str(file)}
    return client, {f"MOONCAKE_CONNECTOR_AGENT_HTTP_{name.upper()}": value for name, value in settings.items()}


@contextmanager
def serving(pool: Path, log: Path) -> Iterator[Client]:
    """The index of an agent of this pool, which has no tiers."""
    with tempfile.TemporaryDirectory() as folder:
        client, env = http(Path(folder))
        agent = Agent(pool, log, env)
        agent.start()
        try:
            wait_for(lambda: answers(client), "an index")
            yield client
        finally:
            agent.stop()


def answers(client: Client) -> bool:
    with suppress(OSError):
        return client.ask("GET", "/health").status == 200
    return False


def knows(index: Says, prompt: Sequence[int], block_tokens: int = PAGE_TOKENS) -> None:
    """Events come in order: once the last prompt is known, so is what went for it."""
    whole = len(prompt) // block_tokens * block_tokens
    wait_for(lambda: index.of(prompt, "GPU") == whole, "the prompt in the index")


def churn(
    index: Says, prompts: Sequence[tuple[int, ...]], find: Callable[[tuple[int, ...]], tuple[int, int]],
    happens: Mapping[int, Callable[[], None]], *, draw: random.Random, block_tokens: int = PAGE_TOKENS, steps: int = 30,
) -> None:  # fmt: skip
    """Whatever comes and goes, what the index says just before is what the server finds. Messages get lost, too.

    Args:
        find: asks, and says how many tokens the server found on its device, and in all.
        happens: before these steps.
    """
    seen: set[tuple[bool, bool]] = set()
    for step in range(steps):
        prompt = draw.choice(prompts)
        happens.get(step, lambda: None)()
        if step % 6 == 3:
            lost, index.relay.loses = index.relay.lost, True
            find(draw_tokens(draw, 700))
            wait_for(lambda lost=lost: index.relay.lost > lost, "a message that is lost")
            index.relay.loses = False
            news = draw_tokens(draw, 200)  # by the next one it is seen that one is missing
            find(news)
            knows(index, news, block_tokens)
        told = index.of(prompt, "GPU"), index.of(prompt)
        assert told == find(prompt), step
        seen.add((told[0] > 0, told[1] > told[0]))  # on the device, and beyond that elsewhere
        knows(index, prompt, block_tokens)
    assert {(False, False), (True, False), (True, True)} <= seen
    assert index.relay.lost and index.counted("gaps") and not index.counted("failed_replays")
    assert not index.counted("unplaced_blocks") and not index.counted("junk")


def losing_for_good(
    deaf: Says, index: Says, find: Callable[[tuple[int, ...]], object], *, draw: random.Random,
    block_tokens: int = PAGE_TOKENS,
) -> None:  # fmt: skip
    """Who cannot ask for what was lost claims neither that nor what was known before; `index`, who can, knows it all.

    Each has a relay of its own.
    """
    before, lost, after = (draw_tokens(draw, 330) for _ in range(3))

    def hears() -> bool:
        find(prompt := draw_tokens(draw, 150))
        return deaf.of(prompt, "GPU") > 0

    wait_for(hears, "events")
    find(before)
    knows(deaf, before, block_tokens)
    deaf.relay.loses = True
    find(lost)
    knows(index, lost, block_tokens)
    number = index.relay.number
    wait_for(lambda: deaf.relay.number >= number and deaf.relay.lost > 0, "messages that are lost")
    deaf.relay.loses = False
    find(after)
    knows(deaf, after, block_tokens)
    assert (deaf.of(before, "GPU"), deaf.of(lost, "GPU")) == (0, 0), "copies on the host are told of later"
    knows(index, after, block_tokens)
    knows(index, before, block_tokens)


def knows_nothing(index: Says, prompts: Sequence[Sequence[int]], medium: str = "longest_matched") -> None:
    wait_for(lambda: not any(index.of(prompt, medium) for prompt in prompts), "an index that knows of nothing")
