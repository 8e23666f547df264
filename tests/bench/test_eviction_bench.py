"""`make bench NAME=eviction`, tiny: that it measures what it says, not how fast."""

from __future__ import annotations

from bench.peers import eviction
from bench.peers.traffic import KEPT_BACK, KINDS, made
from store_client.embedded.policies import POLICIES


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
