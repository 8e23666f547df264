"""A panel that has data shows it, and one that has none says so: what tests/e2e/test_dashboards.py looks at."""

from __future__ import annotations

from pathlib import Path

from dashboards.drawing import drawn, has_data, needs_browser
from dashboards.queries import dashboard, panels

START_S, SECONDS = 1_700_000_000, 60


@needs_browser
def test_panels_with_data_and_without(tmp_path: Path) -> None:
    series = {"metric": {"tier": "a tier"}, "values": [[START_S + second, str(second)] for second in range(SECONDS)]}
    shown = panels()
    empty = {shown[0]["id"], shown[-1]["id"]}
    answers = {
        panel["id"]: [
            {
                "refId": target["refId"],
                "legend": target["legendFormat"],
                "result": [] if panel["id"] in empty else [series],
            }
            for target in panel["targets"]
        ]
        for panel in shown
    }
    found = drawn(dashboard(), answers, START_S, START_S + SECONDS, tmp_path / "dashboard.png")
    assert {panel["id"] for panel in shown if not has_data(found[panel["id"]])} == empty
    (by_tier,) = (panel["id"] for panel in shown if panel["title"] == "Hit rate of tiers")
    assert "a tier" in found[by_tier]
    assert (tmp_path / "dashboard.png").read_bytes().startswith(b"\x89PNG")
