"""The form that comparisons report in: goals are judged honestly, JSON has the keys that readers rely on."""

from __future__ import annotations

import json

import pytest

from bench.peers.report import Comparison, Goal, judged, row
from mooncake_connector.cli.bench.report import Report
from mooncake_connector.cli.bench.report import Row as Measured

BOTH = Goal(at_least_of_limit=0.4, at_least_of_peer=4)


@pytest.mark.parametrize(
    ("goal", "value", "limit", "peer", "ok"),
    [
        (Goal(at_least=2), 2.0, None, None, True),
        (Goal(at_least=2), 1.9, None, None, False),
        (Goal(at_most=5), 5.0, None, None, True),
        (Goal(at_most=5), 5.1, None, None, False),
        (Goal(at_least_of_limit=0.45), 9.0, 20.0, None, True),
        (Goal(at_least_of_limit=0.45), 8.9, 20.0, None, False),
        (Goal(at_least_of_peer=4), 8.0, None, 2.0, True),
        (Goal(at_least_of_peer=4), 7.9, None, 2.0, False),
        (Goal(at_most_of_peer=0.5), 1.0, None, 2.0, True),
        (Goal(at_most_of_peer=0.5), 1.1, None, 2.0, False),
        (BOTH, 10.0, 20.0, 1.0, True),
        (BOTH, 10.0, 20.0, 3.0, False),
        (BOTH, 10.0, 30.0, 1.0, False),
        (BOTH, 10.0, 20.0, None, None),  # not reached while its peer was not measured
        (BOTH, 1.0, 20.0, None, False),  # missed already, whatever the peer
        (Goal(at_most=60), None, None, None, None),
    ],
)
def test_a_goal_is_kept_exactly_up_to_its_bounds_and_judged_by_all_that_could_be_measured(
    goal: Goal, value: float | None, limit: float | None, peer: float | None, ok: bool | None
) -> None:
    assert row("figure", value, "GB/s", limit=limit, peer=peer, goal=goal).ok is ok


def test_a_figure_without_a_goal_has_no_verdict() -> None:
    assert row("figure", 1.0, "GB/s").ok is None
    assert row("figure", 1.0, "GB/s").goal is None


def test_a_goal_says_in_words_what_it_asks() -> None:
    assert Goal(at_least_of_limit=0.45, at_least_of_peer=4).text("GB/s") == ">= 0.45 of limit, >= 4 times peer"
    assert Goal(at_most=5, at_most_of_peer=0.05).text("us") == "<= 5 us, <= 0.05 of peer"


def test_what_a_user_measures_gets_the_goal_and_the_peer_of_its_figure() -> None:
    measured = Report({}, {}, [Measured("get, 1 MiB", 8.0, "GB/s", 10.0), Measured("other", 1.0, "us")])
    get, other = judged(measured, {"get, ": Goal(at_least_of_peer=4)}, {"get, ": 2.0})
    assert (get.value, get.limit, get.peer, get.ok) == (8.0, 10.0, 2.0, True)
    assert (other.peer, other.goal, other.ok) == (None, None, None)


def test_json_is_one_object_with_the_documented_keys() -> None:
    report = Comparison({"cpu": "x", "cores": 2}, {"python": "3.11", "vllm": None}, [row("a", 1.5, "GB/s", limit=3.0)])
    text = report.to_json()
    assert "\n" not in text
    assert json.loads(text) == {
        "machine": {"cpu": "x", "cores": 2},
        "versions": {"python": "3.11", "vllm": None},
        "rows": [
            {"figure": "a", "value": 1.5, "unit": "GB/s", "limit": 3.0, "peer": None, "goal": None, "ok": None},
        ],
    }


def test_the_table_shows_ratios_and_verdicts() -> None:
    rows = [
        row("reached", 10.0, "GB/s", limit=20.0, peer=2.0, goal=Goal(at_least_of_peer=4)),
        row("missed", 1.0, "GB/s", limit=20.0, peer=2.0, goal=Goal(at_least_of_peer=4)),
        row("unknown", 1.0, "GB/s", goal=Goal(at_least_of_peer=4)),
    ]
    _, _, reached, missed, unknown = Comparison({}, {}, rows).to_lines("title", None)
    assert "0.5x" in reached and "5x" in reached and "yes" in reached
    assert "NO" in missed
    assert "?" in unknown


def test_a_quick_run_has_no_verdicts_anywhere() -> None:
    rows = [row("a", 1.0, "GB/s", limit=20.0, peer=2.0, goal=Goal(at_least_of_peer=4))]
    report = Comparison({}, {}, rows).without_verdicts()
    assert json.loads(report.to_json())["rows"][0]["goal"] is json.loads(report.to_json())["rows"][0]["ok"] is None
    heading, line = report.to_lines("", None)
    assert heading.split()[-2:] == ["of", "peer"] and line.split()[-1] == "0.5x"


@pytest.mark.parametrize("width", [40, 80, 200, None])
def test_no_terminal_is_too_narrow_for_a_report(width: int | None) -> None:
    rows = [row("prefix of 2,048 pages, all there", 123456.0, "us", limit=7.0, peer=9.0, goal=Goal(at_most=5))]
    text = "\n".join(Comparison({}, {}, rows).to_lines("title", width))
    for value in ("123,456", "2,048", "1.37e+04x", "<= 5 us", "NO"):
        assert value in text
