"""`make bench NAME=eviction`: what each eviction policy finds of made traffic, and what its choices cost.

Hits do not depend on the machine. Times are the processor's, of the calling thread: the best of some rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.peers.report import Comparison, Goal, Row, row
from bench.peers.traffic import KEPT_BACK, KINDS, made
from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.measure import Progress
from store_client.embedded.policies import POLICIES, Arrivals, Candidates, Hints, Policy
from store_client.embedded.row import NONE
from store_client.simulation.sweep import all_pages_nbytes, simulate

_TOKEN_NBYTES = 2048
_BATCH = 64
_NOW_NS = 1 << 42
_HOUR_NS = 3600 * 10**9
_GOING = 100
"""One page in so many goes at a time."""


@dataclass(frozen=True)
class Scale:
    shares: tuple[float, ...] = (0.03, 0.1, 0.25)
    """Of a trace's different pages, that the pool has room for."""
    prompts: int | None = None
    pools: tuple[tuple[int, int], ...] = ((131_072, 8), (8_192, 512))
    """Pages, and how many granules of 4 KiB each has."""
    rounds: int = 30


QUICK = Scale(shares=(0.2,), prompts=60, pools=((512, 8),), rounds=2)


def run(folder: Path, scale: Scale, progress: Progress) -> Comparison:
    rows = []
    for kind in KINDS + KEPT_BACK:
        progress(f"hits of {kind.__name__}")
        rows += _hits(kind, scale)
    for pages, granules in scale.pools:
        for name in POLICIES:
            progress(f"choices of {name} among {pages:,} pages")
            rows += _costs(name, pages, granules, scale.rounds)
    return Comparison(describe_machine(folder), describe_versions(), rows)


def _hits(kind: Callable[..., object], scale: Scale) -> list[Row]:
    trace = made(kind, scale.prompts)  # type: ignore[arg-type]
    rows = []
    for share in scale.shares:
        capacity = int(all_pages_nbytes(trace, _TOKEN_NBYTES) * share)
        rates = {name: 100 * simulate(trace, name, capacity, _TOKEN_NBYTES).hit_rate for name in POLICIES}
        best = max(rate for name, rate in rates.items() if name != "auto")
        for name, rate in rates.items():
            goal = Goal(at_least=round(best - 0.5, 2)) if name == "auto" else None
            rows.append(row(f"{kind.__name__}, {share:.0%} of its pages: hits with {name}", rate, "%", goal=goal))
    return rows


def _costs(name: str, num_pages: int, granules: int, rounds: int) -> list[Row]:
    """Of a full pool of conversations of up to four turns, of which some are used again now and then."""
    draw = np.random.default_rng(18)
    pages, policy = _full_pool(draw, num_pages, granules), POLICIES[name](Hints(None, num_pages))
    if name == "auto":  # returns were seen, as many as count after some hours
        for table in (policy.hints.returned, policy.hints.lost):
            table[:] = draw.random(table.shape) * 90
    stored_s = _store_all(policy, pages, draw)
    evicted_s, prints = [], draw.integers(1, 1 << 63, num_pages).astype(np.uint64)
    for _ in range(rounds):
        uses = pages.uses.copy()
        begun_s = time.thread_time()
        victims = policy.victims(pages, num_pages * granules // _GOING, 1, _NOW_NS, _NOW_NS + _HOUR_NS)
        evicted_s.append((time.thread_time() - begun_s) / len(victims))
        pages.uses[:] = uses
        _store(policy, pages, victims[::-1], prints)  # so much comes in as goes, which renews what `auto` knows
    what = f"of {num_pages:,} pages of {granules * 4} KiB"
    return [
        row(f"{name}, a page {what} that goes, best", min(evicted_s) * 1e6, "us", goal=Goal(at_most=2)),
        row(f"{name}, a page {what} that goes, mean", sum(evicted_s) / rounds * 1e6, "us", goal=Goal(at_most=2)),
        row(f"{name}, a page {what} that is stored, best", stored_s * 1e6, "us"),
    ]


def _store_all(policy: Policy, pages: Candidates, draw: np.random.Generator) -> float:
    """Seconds for a page, in the best batch."""
    order = np.lexsort((pages.depth, pages.access))  # each chain in its order
    prints = draw.integers(1, 1 << 63, len(order)).astype(np.uint64)
    return min(_store(policy, pages, order[at : at + _BATCH], prints) for at in range(0, len(order), _BATCH))


def _store(policy: Policy, pages: Candidates, slots: np.ndarray, prints: np.ndarray) -> float:
    above = pages.parent[slots]
    linked = above < len(pages.uses)
    uses = np.where(linked, pages.uses[np.where(linked, above, 0)], 0).astype(np.uint8)
    arrivals = Arrivals(slots, prints[slots], above, uses, pages.count)
    begun_s = time.thread_time()
    policy.stored(arrivals, _NOW_NS)
    return (time.thread_time() - begun_s) / len(slots)


def _full_pool(draw: np.random.Generator, num_pages: int, granules: int) -> Candidates:
    """Chains of turns of 3 to 20 pages, in slots that lie anywhere."""
    access, parent = np.zeros(num_pages, dtype=np.uint64), np.full(num_pages, NONE, dtype=np.uint32)
    uses, depth = np.zeros(num_pages, dtype=np.uint8), np.zeros(num_pages, dtype=np.uint32)
    slots, at = draw.permutation(num_pages).astype(np.uint32), 0
    while at < num_pages:
        turns = draw.integers(3, 21, draw.integers(1, 5))
        chain = slots[at : at + int(turns.sum())]
        parent[chain[1:]], depth[chain] = chain[:-1], np.arange(len(chain))
        access[chain] = draw.integers(_NOW_NS >> 1, _NOW_NS)  # the last turn used all that is before it
        uses[chain] = np.repeat(np.arange(len(turns))[::-1], turns)[: len(chain)]
        at += len(chain)
    return Candidates(access, uses, parent, depth, np.full(num_pages, granules, dtype=np.uint32), num_pages)
