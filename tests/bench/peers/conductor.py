"""`make bench NAME=index`: what questions to the agent's index cost, and the events that it takes in. CPU time, since a
router's question waits for nothing else: of the server's thread, or of all threads that take part.

A hundred instances have parts of some prompts in memory of their own; half of them read the pool too, which has all.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from prometheus_client import CollectorRegistry

from bench.peers.report import Comparison, Goal, Row, row
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import BenchError, Progress
from mooncake_connector.cli.bench.processes import free_ports
from mooncake_connector.cli.bench.serve.client import Server
from mooncake_connector.cli.bench.store import bench_namespace
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.keys import page_keys
from store_client import EmbeddedStore
from store_client.agent.http.app import App
from store_client.agent.http.conductor import Conductor
from store_client.agent.http.server import HttpServer
from store_client.agent.index.feeds import Feeds
from store_client.agent.index.hashes import seq_hashes
from store_client.agent.index.held import Context, Held
from store_client.agent.index.index import Index, Instance
from store_client.agent.index.pages import Pages
from store_client.agent.index.parts import Parts
from store_client.agent.index.requests import Registration
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
    prompts = [draw.integers(0, 150_000, scale.blocks * size) for _ in range(scale.prompts)]
    with tempfile.TemporaryDirectory(dir=folder) as name, EmbeddedStore(Path(name) / "pool", 256 << 20) as store:
        index = Index(Pages(store, lambda *asked: []))
        for prompt in prompts:
            put_chain(store.space(bench_namespace(), _SHARD), page_keys(prompt, bench_namespace().page_tokens), 4096)
        hashes = [seq_hashes(prompt.astype(np.uint32), size) for prompt in prompts]
        for number in range(scale.instances):
            fields = {"modelname": bench_namespace().model_name, "block_size": size, "type": "vLLM"}
            of, _ = index.register(Registration(instance_id=f"i{number}", pool=number % 2 == 0, **fields))
            assert of is not None
            owner = of.owners["GPU", size] = index.held.new_owner()
            for one in hashes:
                index.held.add(Context(size, "", ""), owner, one[: draw.integers(0, len(one))])
        asked = {"model": bench_namespace().model_name, "block_size": size}
        work = f"{scale.blocks:,} blocks of {size} tokens, {scale.instances} instances"
        by_tokens = [("/query", {**asked, "token_ids": prompt.tolist()}) for prompt in prompts]
        by_hash = [("/query_by_hash", {**asked, "seq_hashes": one}) for one in hashes]
        rows = []
        with _served(index) as server:
            for what, questions, parts in (
                ("/query, new prompts", by_tokens, Parts(most=0)),
                ("/query, prompts that were asked for before", by_tokens, Parts()),
                ("/query_by_hash", by_hash, Parts()),
            ):
                index.parts = parts
                cuts = statistics.quantiles(_cpu_ms(server, questions, scale), n=100, method="inclusive")
                rows.append(row(f"{what}, {work}: CPU time, p50", cuts[49], "ms"))
                rows.append(row(f"{what}, {work}: CPU time, p99", cuts[98], "ms", goal=Goal(at_most=5)))
        return rows


@contextlib.contextmanager
def _served(index: Index) -> Iterator[Server]:
    (port,) = free_ports(1)
    app = App(Conductor(index, CollectorRegistry(), Feeds(index.held)).routes(), b"")
    with HttpServer("127.0.0.1", port, app):
        server = Server("127.0.0.1", port)
        give_up_s = time.monotonic() + _LIMIT_S
        while not server.is_healthy():
            if time.monotonic() > give_up_s:
                raise BenchError("the index does not answer")
            time.sleep(0.05)
        yield server


def _cpu_ms(server: Server, questions: list[tuple[str, dict[str, Any]]], scale: Scale) -> list[float]:
    """Of the server's thread, from one answer to the next: its HTTP and JSON are in it."""
    thread = next(one for one in threading.enumerate() if one.name == "mooncake-connector-http")
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    found = []
    for number in range(scale.questions + len(questions)):
        path, body = questions[number % len(questions)]
        before_s = time.clock_gettime(clock)
        answer = server.call("POST", path, body, _LIMIT_S, lambda reply: json.loads(reply.read()))
        if len(answer.get("default", ())) != scale.instances:
            raise BenchError(f"{path} answered {answer}")
        if number >= len(questions):  # the first of each warms caches
            found.append((time.clock_gettime(clock) - before_s) * 1e3)
    return found


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
