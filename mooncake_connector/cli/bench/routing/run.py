"""One trace through the router's policies: hit rate, time to first token, and how evenly the work was spread."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np

from mooncake_connector.cli.bench.routing.engine import Clock, Engine, Job, Shape
from mooncake_connector.cli.bench.routing.trace import BLOCK_TOKENS, Asked
from mooncake_connector.deploy.history import History
from mooncake_connector.deploy.instances import Group, Instance, Work
from mooncake_connector.deploy.policies import Conductor, LeastLoaded, Policy, Prompt, RoundRobin, Weights
from mooncake_connector.deploy.prefixes import HISTORY_CHUNKS
from mooncake_connector.deploy.prompts import CHUNK_TOKENS


class Outcome(msgspec.Struct, frozen=True):
    """Of all requests of a trace.

    Args:
        hit_rate: prompt tokens that were not computed, of all.
        busiest: tokens computed by the instance that computed the most, over the mean of all; 1 is even.
    """

    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    busiest: float


class Source(enum.Enum):
    """Where a policy knows from what is cached: nowhere, from what the router sent where, or exactly."""

    NOTHING = enum.auto()
    HISTORY = enum.auto()
    INDEX = enum.auto()


def policies() -> Iterator[tuple[str, Policy, Source]]:
    """What is compared, each by its name."""
    yield "round_robin", RoundRobin(), Source.NOTHING
    yield "least_loaded", LeastLoaded(), Source.NOTHING
    yield "conductor, history", Conductor(Weights()), Source.HISTORY
    yield "conductor, index", Conductor(Weights()), Source.INDEX


def simulate(trace: Sequence[Asked], shape: Shape, count: int, policy: Policy, source: Source) -> Outcome:
    """Every request of the trace at its time, to `count` instances."""
    clock = Clock()
    engines = {f"http://{number}": Engine(shape, clock) for number in range(count)}
    group = Group([Instance(url, failures=0) for url in engines], policy)
    history = History(HISTORY_CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS)
    ttfts: list[float] = []

    def arrive(asked: Asked) -> None:
        came_s = clock.now_s
        if source is Source.INDEX:
            blocks = {url: engine.cached(asked.hash_ids) for url, engine in engines.items()}
        elif source is Source.HISTORY:
            blocks = {url: history.matched(url, asked.hash_ids) for url in engines}
        else:
            blocks = {}
        prompt = Prompt(asked.input_length, {url: found * BLOCK_TOKENS for url, found in blocks.items()})
        one = group.choose((), prompt)
        assert one is not None
        if source is Source.HISTORY:
            history.note(one.url, asked.hash_ids)
        work = Work(one, prompt)

        def first() -> None:
            work.prefilled()
            ttfts.append(clock.now_s - came_s)

        engines[one.url].submit(Job(asked, first, work.end))

    for asked in trace:
        clock.at(asked.timestamp / 1000.0, partial(arrive, asked))
    clock.run()
    computed = [engine.computed_tokens for engine in engines.values()]
    tokens = sum(one.input_length for one in trace)
    p50, p99 = np.percentile(ttfts, (50, 99))
    busiest = max(computed) * count / max(1, sum(computed))
    return Outcome(1.0 - sum(computed) / tokens, float(p50), float(p99), busiest)
