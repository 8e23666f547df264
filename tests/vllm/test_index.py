"""What routers are told of a vLLM is what its prefix cache and the pool have: its own scheduler and publisher."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cases import PROMPT, Start
from harness import Engine
from simulated.waiting import wait_for
from vllm import SamplingParams
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from mooncake_connector.kv.keys import page_keys
from store_client import EmbeddedStore
from store_client.agent.index.feeds import Feeds
from store_client.agent.index.index import Index
from store_client.agent.index.pages import Pages
from store_client.agent.index.parts import Prompt
from store_client.agent.index.requests import Query, Registration


class Told:
    """An index that follows a publisher of vLLM's, and reads the pool."""

    def __init__(self, pool: Path) -> None:
        self.endpoints = {"endpoint": f"ipc://{pool.parent}/out", "replay_endpoint": f"ipc://{pool.parent}/again"}
        self.publisher = ZmqEventPublisher(0, **self.endpoints)
        self._store = EmbeddedStore(pool, rebuild=False)
        self.index = Index(Pages(self._store, lambda *asked: []))
        self.feeds = Feeds(self.index.held)

    def publishes_anew(self) -> None:
        """A new engine at the same addresses, which begins to count at 0."""
        self.publisher.shutdown()
        self.publisher = ZmqEventPublisher(0, **self.endpoints)

    def register(self, namespace: str) -> None:
        registration = Registration(
            instance_id="a", modelname="m", block_size=16, type="vLLM", namespace=namespace, **self.endpoints
        )
        instance, remark = self.index.register(registration)
        assert instance is not None and not remark
        assert not self.feeds.follow(instance)

    def of(self, tokens: list[int]) -> tuple[int, int, int]:
        """GPU, CPU, longest."""
        query = Query(model="m", block_size=16, token_ids=msgspec.Raw(b"[]"))
        answer = asyncio.run(self.index.query(query, Prompt(np.array(tokens, dtype=np.uint32))))["default"]["a"]
        return answer["GPU"], answer["CPU"], answer["longest_matched"]

    def close(self) -> None:
        self.feeds.close()
        self.publisher.shutdown()
        self._store.close()


def test_of_a_vllm_the_index_knows_what_its_own_cache_and_the_pool_have(start: Start, pool: Path) -> None:
    engine = start(events=True)
    engine.ask(list(range(300, 350)))  # so that there is a pool, and a namespace in it
    namespace = engine.prefix.namespace().digest.hex()
    with closing(Told(pool)) as told:
        engine.scheduler.kv_event_publisher = told.publisher
        engine.ask(PROMPT)  # before anybody follows: it is replayed
        told.register(namespace)
        whole = len(PROMPT) // 16 * 16
        wait_for(lambda: told.of(PROMPT) == (whole, whole, whole))
        assert told.of([7, *PROMPT]) == (0, 0, 0)

        engine.scheduler.reset_prefix_cache()
        engine.ask(list(range(400, 420)))  # its events go out with a step
        wait_for(lambda: told.of(PROMPT)[0] == 0)
        assert told.of(PROMPT) == (0, whole, whole)
        engine.ask(PROMPT)
        wait_for(lambda: told.of(PROMPT)[0] > 0)
        with EmbeddedStore(pool, rebuild=False) as store:
            store.clear()
        assert told.of(PROMPT)[1] == 0
        told.publisher.shutdown()
        wait_for(lambda: told.of(PROMPT)[0] == 0)


class Leaky:
    """vLLM's socket, of which messages do not arrive while it `leaks`."""

    def __init__(self, socket: Any) -> None:
        self._socket, self.leaks, self.lost = socket, False, 0

    def send_multipart(self, frames: Any) -> None:
        if self.leaks:
            self.lost += 1
        else:
            self._socket.send_multipart(frames)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


def truth(engine: Engine, tokens: list[int]) -> int:
    """What the engine's own manager finds of a prompt; it never takes the last token from a cache, so one more."""
    hasher, params = get_request_block_hasher(16, sha256), SamplingParams(max_tokens=1)
    request = Request("asked", [*tokens, 1], params, None, block_hasher=hasher)
    return int(engine.scheduler.kv_cache_manager.get_computed_blocks(request)[1])


def test_what_the_index_says_under_churn_is_what_engine_and_pool_have(start: Start, pool: Path) -> None:
    """Prompts come and go in a small cache, messages are lost, the engine is replaced, the pool is cleared."""
    draw = random.Random(3)
    trunks = [[draw.randrange(2, 500) for _ in range(48)] for _ in range(3)]
    # A bit more than full blocks: of a prompt that it has to its end vLLM computes the last block again, and when one
    # of the two copies goes, it says that the block is removed.
    prompts = [trunks[n % 3] + [draw.randrange(2, 500) for _ in range(16 * (n % 4) + 21)] for n in range(8)]
    engine = start(events=True, num_blocks=24)
    engine.ask(prompts[0])
    with closing(Told(pool)) as told, EmbeddedStore(pool, rebuild=False) as store:
        told.register(engine.prefix.namespace().digest.hex())

        def publishes() -> Leaky:
            engine.scheduler.kv_event_publisher = told.publisher
            told.publisher._pub = leaky = Leaky(told.publisher._pub)
            engine.scheduler.reset_prefix_cache()  # what was cached before was told to nobody
            return leaky

        leaky, most = publishes(), 0
        for step in range(40):
            leaky.leaks = step % 5 == 2
            engine.ask(draw.choice(prompts))
            if step == 12:
                store.clear()
            if step == 25:
                engine.shut_down()
                engine = start(events=True, num_blocks=24)
                told.publishes_anew()
                leaky = publishes()
            if leaky.leaks:
                continue
            expected = [truth(engine, prompt) for prompt in prompts]
            wait_for(lambda expected=expected: [told.of(prompt)[0] for prompt in prompts] == expected)
            space = engine.prefix.namespace()
            keys = [page_keys(prompt, space.page_tokens) for prompt in prompts]
            (shard,) = store.shards(space)
            in_pool = [16 * store.space(space, shard).lookup(of).pages for of in keys]
            assert [told.of(prompt)[1] for prompt in prompts] == in_pool, step
            most = max(most, sum(expected))
        assert most > 100 and leaky.lost and told.feeds.counts["gaps"], told.feeds.counts
