"""`make bench NAME=index`, tiny: that it measures what it says, not how fast."""

from __future__ import annotations

from bench.peers import conductor


def test_every_question_and_event_is_measured(tmp_path) -> None:
    scale = conductor.Scale(blocks=8, instances=4, prompts=2, questions=3, events=640)
    rows = conductor.run(tmp_path, scale, lambda line: None).rows
    assert [row.unit for row in rows] == ["ms"] * 20 + ["% of a core"] * 2
    assert all(row.value is not None and row.value > 0 for row in rows)
    assert {row.goal for row in rows} == {None, "<= 5 ms", "<= 30 % of a core"}
