"""`make bench NAME=index`: what questions to the agent's index cost, and the events that it takes in. CPU time, since a
router's question waits for nothing else: of the server's thread, or of all threads that take part.

A hundred instances have parts of some prompts in memory of their own; half of them read the pool too, which has all.
Those are asked for again and again, or as if they were new each time; of others nobody has anything, or three quarters
as in the next turn of a conversation.

The limit of a question is a server that takes it in and has its answer ready, and the steps that no answer is without,
each alone and over and over: to read it, to name its blocks and pages, and to look for them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zmq
from prometheus_client import CollectorRegistry

from bench.peers.report import Comparison, Goal, Row, row
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.processes import free_ports
from mooncake_connector.cli.bench.store import bench_namespace
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from store_client import EmbeddedStore
from store_client.agent.http.app import App, Request, Response, Route
from store_client.agent.http.conductor import Conductor
from store_client.agent.http.server import HttpServer
from store_client.agent.index.feeds import Feeds
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.held import Context, Held
from store_client.agent.index.index import Index, Instance
from store_client.agent.index.pages import Pages
from store_client.agent.index.parts import Parts
from store_client.agent.index.requests import QueryByHash, Registration, decode, decode_query
from store_client.testing import put_chain

_LIMIT_S = 300.0
_SHARD = Shard(0, 32, 0, 8)


@dataclass(frozen=True)
class Scale:
    blocks: int = 2048
    instances: int = 100
    prompts: int = 5
    questions: int = 300
    """Of each kind."""
    events: int = 100_000
    """Blocks that are stored, and removed again."""


QUICK = Scale(blocks=64, questions=10, events=1_000)


def run(folder: Path, scale: Scale, progress: Progress) -> Comparison:
    rows = []
    for size in (16, 64):
        progress(f"questions of {scale.blocks:,} blocks of {size} tokens")
        rows += _questions(folder, scale, size)
    for size in (16, 64):
        progress(f"events of {scale.events:,} blocks of {size} tokens")
        rows.append(_events(scale, size))
    return Comparison(describe_machine(folder), describe_versions(), rows)


def _questions(folder: Path, scale: Scale, size: int) -> list[Row]:
    draw = np.random.default_rng(18)
    prompts = [_prompt(draw, scale.blocks * size) for _ in range(scale.prompts)]
    with tempfile.TemporaryDirectory(dir=folder) as name, EmbeddedStore(Path(name) / "pool", 512 << 20) as store:
        hashes = [seq_hashes(prompt.astype(np.uint32), size) for prompt in prompts]
        index = _filled(store, prompts, hashes, size, draw, scale.instances)
        asked = {"model": bench_namespace().model_name, "block_size": size}

        def by_tokens(prompt: Tokens) -> tuple[str, bytes]:
            return "/query", _encoded({**asked, "token_ids": prompt.tolist()})

        def turn(number: int) -> tuple[str, bytes]:
            known = prompts[number % len(prompts)][: scale.blocks * size * 3 // 4]
            return by_tokens(np.append(known, _prompt(draw, scale.blocks * size - len(known))))

        by_hash = [("/query_by_hash", _encoded({**asked, "seq_hashes": one})) for one in hashes]
        again = [by_tokens(prompt) for prompt in prompts]
        pages, context = store.space(bench_namespace(), _SHARD), Context(size, "", "")
        tokens, text = prompts[0].astype(np.uint32), again[0][1]
        keys = page_keys(tokens, bench_namespace().page_tokens)
        held, looked = lambda: index.held.present(context, hashes[0]), lambda: pages.contains(keys)
        as_new = [
            lambda: _read(text), lambda: page_keys(tokens, bench_namespace().page_tokens),
            lambda: seq_hashes(tokens, size), held, looked,
        ]  # fmt: skip
        as_known = [lambda: xxhash.xxh3_128_digest(text), held, looked]
        rows = []
        for what, question, kept, steps in (
            ("/query, new prompts that nobody has", lambda _: by_tokens(_prompt(draw, scale.blocks * size)), True, []),
            ("/query, the next turn: a quarter is new and nobody has it", turn, True, as_known),
            ("/query, prompts that were asked for before", lambda number: again[number % len(again)], True, as_known),
            ("/query, as if new, though all is held", lambda number: again[number % len(again)], False, as_new),
            (
                "/query_by_hash", lambda number: by_hash[number % len(by_hash)], True,
                [lambda: decode(by_hash[0][1], QueryByHash), held],
            ),
        ):  # fmt: skip
            index.parts = Parts() if kept else Parts(most_nbytes=0)
            with _served(Conductor(index, CollectorRegistry(), Feeds(index.held)).routes()) as ask:
                for first in again:
                    answer = ask(*first)
                cuts = statistics.quantiles(_cpu_ms(ask, question, scale), n=100, method="inclusive")
            with _served(_bare(answer)) as ask:
                floor_ms = statistics.median(_cpu_ms(ask, question, scale)) + sum(map(_alone_ms, steps))
            work = f"{what}, {scale.blocks:,} blocks of {size} tokens, {scale.instances} instances: CPU time"
            rows.append(row(f"{work}, p50", cuts[49], "ms", limit=floor_ms))
            rows.append(row(f"{work}, p99", cuts[98], "ms", limit=floor_ms, goal=Goal(at_most=5)))
        return rows


Tokens = npt.NDArray[np.int64]


def _filled(
    store: EmbeddedStore, prompts: list[Tokens], hashes: list[list[int]], size: int, draw: np.random.Generator,
    instances: int,
) -> Index:  # fmt: skip
    """All of the prompts in the pool, and parts of them with so many instances."""
    index = Index(Pages(store, lambda *asked: []))
    for prompt in prompts:
        put_chain(store.space(bench_namespace(), _SHARD), page_keys(prompt, bench_namespace().page_tokens), 4096)
    for number in range(instances):
        fields = {"modelname": bench_namespace().model_name, "block_size": size, "type": "vLLM"}
        of, _ = index.register(Registration(instance_id=f"i{number}", pool=number % 2 == 0, **fields))
        assert of is not None
        owner = of.owners["GPU", size] = index.held.new_owner()
        for one in hashes:
            index.held.add(Context(size, "", ""), owner, one[: draw.integers(0, len(one))])
    return index


def _prompt(draw: np.random.Generator, num_tokens: int) -> Tokens:
    return draw.integers(0, 150_000, num_tokens)


def _read(body: bytes) -> None:
    _, prompt = decode_query(body, Parts(most_nbytes=0))
    prompt.tokens(0, prompt.num_parts)


def _encoded(question: dict[str, Any]) -> bytes:
    return json.dumps(question).encode()


Routes = Mapping[str, Mapping[str, Route]]
Ask = Callable[[str, bytes], bytes]


def _bare(answer: bytes) -> Routes:
    """Of a server that takes in what it is asked, and has this answer to all of it."""

    async def give(request: Request) -> Response:
        return Response(answer)

    return {path: {"POST": Route(give)} for path in ("/query", "/query_by_hash")}


@contextlib.contextmanager
def _served(routes: Routes) -> Iterator[Ask]:
    """Who asks the agent's server, over a connection for each question, as our router does."""
    (port,) = free_ports(1)

    def ask(path: str, body: bytes) -> bytes:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            return connection.getresponse().read()

    with HttpServer("127.0.0.1", port, App(routes, b"")):
        give_up_s = time.monotonic() + _LIMIT_S
        while True:
            try:
                ask("/", b"")
                break
            except OSError:
                if time.monotonic() > give_up_s:
                    raise BenchError("the index does not answer") from None
                time.sleep(0.05)
        yield ask


def _cpu_ms(ask: Ask, question: Callable[[int], tuple[str, bytes]], scale: Scale) -> list[float]:
    """Of the server's thread, from one answer to the next: its HTTP and JSON are in it."""
    thread = next(one for one in threading.enumerate() if one.name == "mooncake-connector-http")
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    found = []
    for number in range(scale.questions + scale.prompts):
        path, body = question(number)
        before_s = time.clock_gettime(clock)
        answer = json.loads(ask(path, body))
        if len(answer.get("default", ())) != scale.instances:
            raise BenchError(f"{path} answered {answer}")
        if number >= scale.prompts:  # the first of each warms caches
            found.append((time.clock_gettime(clock) - before_s) * 1e3)
    return found


def _alone_ms(step: Callable[[], object]) -> float:
    """The median of one step of an answer, by itself and over and over."""
    found = []
    for _ in range(50):
        before_s = time.thread_time()
        step()
        found.append((time.thread_time() - before_s) * 1e3)
    return statistics.median(found)


def _events(scale: Scale, size: int) -> Row:
    """CPU time of all threads of this process, while another one publishes: as a part of the time that so many take to
    come where they come 10,000 in a second."""
    spawning, feeds = multiprocessing.get_context("spawn"), Feeds(Held())
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        process = spawning.Process(target=publish, args=(endpoint, scale.events, size), daemon=True)
        process.start()
        try:
            registered = Registration(instance_id="a", modelname="m", block_size=size, type="vLLM", endpoint=endpoint)
            before_s = time.process_time()
            feeds.follow(Instance(registered, False))
            _wait(lambda: feeds.counts["stored_blocks"] >= scale.events)
            cpu_s, taken = time.process_time() - before_s, feeds.counts["stored_blocks"]
        finally:
            process.kill()
            process.join()
            feeds.close()
    text = f"events of 10,000 blocks of {size} tokens stored and removed in a second: CPU time"
    return row(text, 100 * cpu_s / (taken / 10_000), "% of a core", goal=Goal(at_most=30))


def _wait(is_so: Any) -> None:
    give_up_s = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > give_up_s:
            raise BenchError("the events were not taken in")
        time.sleep(0.2)


def publish(endpoint: str, count: int, size: int) -> None:
    """Prompts of 64 blocks, as vLLM publishes them, each removed when the next ones are there."""
    draw, out = random.Random(3), zmq.Context().socket(zmq.XPUB)
    out.set(zmq.SNDHWM, 0)
    out.bind(endpoint)
    out.recv()  # until somebody listens, who has to hear the first words
    number, sent, gone = 0, 0, list[list[bytes]]()
    while True:
        hashes = [draw.randbytes(32) for _ in range(64)]
        event = {
            "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "block_size": size,
            "token_ids": draw.choices(range(150_000), k=64 * size), "lora_id": None, "medium": "GPU",
        }  # fmt: skip
        events: list[dict[str, Any]] = [event]
        gone.append(hashes)
        if len(gone) > 100:
            events += [{"type": "BlockRemoved", "block_hashes": [one], "medium": "GPU"} for one in gone.pop(0)]
        out.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([time.time(), events, 0])])
        number, sent = number + 1, sent + 64
        if sent > 4 * count:
            time.sleep(_LIMIT_S)
