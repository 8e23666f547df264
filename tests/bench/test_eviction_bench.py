"""`make bench NAME=eviction`, tiny: that it measures what it says, not how fast."""

from __future__ import annotations

import pytest

from bench.peers import eviction
from bench.peers.traffic import KEPT_BACK, KINDS, documents, made, returns
from store_client.embedded.policies import POLICIES
from store_client.simulation.sweep import all_pages_nbytes, simulate


def test_every_kind_and_policy_is_measured(tmp_path) -> None:
    rows = eviction.run(tmp_path, eviction.QUICK, lambda line: None).rows
    assert [row.unit for row in rows] == ["%"] * len(KINDS + KEPT_BACK) * len(POLICIES) + ["us"] * 3 * len(POLICIES)
    assert all(row.value is not None and row.value >= 0 for row in rows)
    assert {row.goal is None for row in rows if "auto" in row.figure and row.unit == "%"} == {False}


def test_made_traffic_is_the_same_each_time() -> None:
    assert made(KINDS[0], 50) == made(KINDS[0], 50) != made(KINDS[1], 50)


def test_pages_of_made_traffic_are_named_by_what_is_before_them() -> None:
    for kind in KINDS + KEPT_BACK:
        trace = made(kind, 50)
        before: dict[int, int | None] = {}
        for request in trace.requests:
            for above, page in zip([None, *request.pages], request.pages, strict=False):
                assert before.setdefault(page, above) == above


@pytest.mark.parametrize("kind, share, points", [(returns, 0.03, 20.0), (documents, 0.25, -0.8)])
def test_auto_against_the_better_of_the_others(kind, share: float, points: float) -> None:
    """Hits of seeded traffic are the same on any machine; docs/benchmarks.md has +22.0 and -0.7."""
    trace = made(kind)
    capacity = int(all_pages_nbytes(trace, 2048) * share)
    hits = {name: 100 * simulate(trace, name, capacity, 2048).hit_rate for name in POLICIES}
    assert hits.pop("auto") - max(hits.values()) > points
