"""Sizes and policies beside each other: what share of a trace's tokens would have been found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

from mooncake_connector.errors import MooncakeConnectorError
from store_client.embedded.arena import GRANULE
from store_client.simulation.model import ModelPool
from store_client.simulation.traces import Trace

_START_NS = 1 << 40
"""The pool's clock at the first request: a page was never used at 0."""
_LITTLE = 0.03
"""A doubling that brings no more than so much of all tokens is not worth its memory."""


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    capacity_nbytes: int
    pages: int
    hit_pages: int
    tokens: int
    hit_tokens: int
    evicted_pages: int

    @property
    def hit_rate(self) -> float:
        """Hit tokens of all."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def simulate(trace: Trace, policy: str, capacity_nbytes: int, token_nbytes: int) -> Outcome:
    """Run the trace against a model pool of this size, for a model whose KV takes `token_nbytes` a token."""
    pool = ModelPool(policy, capacity_nbytes, trace.page_tokens * token_nbytes, trace.num_pages)
    pages = hit_pages = tokens = hit_tokens = 0
    for request in trace.requests:
        hit = pool.request(_START_NS + request.at_ns, request.pages)
        pages += len(request.pages)
        hit_pages += hit
        tokens += request.tokens
        hit_tokens += min(hit * trace.page_tokens, request.tokens)
    return Outcome(policy, capacity_nbytes, pages, hit_pages, tokens, hit_tokens, pool.evicted)


def all_pages_nbytes(trace: Trace, token_nbytes: int) -> int:
    """The capacity in which every page of the trace stays."""
    return trace.num_pages * -(-trace.page_tokens * token_nbytes // GRANULE) * GRANULE


class _Worker:
    """A process of a sweep: it has the trace from its parent by the fork, not as a copy for each run."""

    trace: Trace

    @classmethod
    def begin(cls, trace: Trace) -> None:
        cls.trace = trace

    @classmethod
    def simulate(cls, policy: str, capacity_nbytes: int, token_nbytes: int) -> Outcome:
        return simulate(cls.trace, policy, capacity_nbytes, token_nbytes)


def sweep(
    trace: Trace, policies: Sequence[str], capacities: Sequence[int], token_nbytes: int, processes: int,
    report: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """`simulate` for all, in so many processes; by policy and size. `report` is told how many are done, of how many.

    Raises MooncakeConnectorError where a process is killed, as for want of memory.
    """
    wanted = [(policy, capacity) for policy in policies for capacity in capacities]
    found: dict[tuple[str, int], Outcome] = {}
    processes = min(processes, len(wanted))
    try:
        with ProcessPoolExecutor(processes, get_context("fork"), _Worker.begin, (trace,)) as pool:
            futures = {pool.submit(_Worker.simulate, *each, token_nbytes): each for each in wanted}
            for future in as_completed(futures):
                found[futures[future]] = future.result()
                if report is not None:
                    report(len(found), len(wanted))
    except (BrokenProcessPool, MemoryError):
        raise MooncakeConnectorError(
            f"a process of the simulation was killed after {len(found)} of {len(wanted)} runs: for want of memory, "
            "probably; name fewer sizes, or a shorter trace"
        ) from None
    return [found[each] for each in wanted]


def advice(outcomes: Sequence[Outcome]) -> tuple[Outcome, Outcome] | None:
    """Of one policy's outcomes, by size: the first whose doubling brings little, and what the doubling gives."""
    by_size = {outcome.capacity_nbytes: outcome for outcome in outcomes}
    pairs = [(each, by_size[2 * size]) for size, each in sorted(by_size.items()) if 2 * size in by_size]
    little = [pair for pair in pairs if pair[1].hit_rate - pair[0].hit_rate <= _LITTLE]
    return little[0] if little else pairs[-1] if pairs else None
