"""Every panel of the dashboard has data, and alerts fire, in a real Prometheus that reads real engines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards.drawing import drawn, has_data, needs_browser
from dashboards.prometheus import needs_prometheus
from dashboards.queries import as_asked, dashboard, panels

from e2e.monitored import HAS_SGLANG, Seen, monitored
from e2e.pages import wait_for

WINDOW, STEP_S = "10s", 1.0
PROVOKED = {"MooncakePagesCorrupt", "MooncakePagesEvictedYoung", "MooncakeTierDown"}
NOT_PROVOKED = {"MooncakePoolUnavailable", "MooncakeAgentDown", "MooncakeTransfersFailing"}
NOT_OF_SGLANG = "connector_(transfers|transport|fetch|failures)"

pytestmark = [needs_prometheus, pytest.mark.long]


@pytest.fixture(scope="module")
def seen(qwen3: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with monitored(qwen3, logs, tmp_path_factory.mktemp("monitored")) as found:
        yield found


def answer(seen: Seen, expr: str) -> list[dict]:
    """The series of a query."""
    return seen.prometheus.query_range(as_asked(expr, WINDOW), seen.start_s, seen.end_s, STEP_S)


def values(seen: Seen, expr: str) -> list[float]:
    """All numbers that are drawn of a query."""
    numbers = [float(value) for series in answer(seen, expr) for _, value in series["values"]]
    return [number for number in numbers if math.isfinite(number)]


def is_expected(target: dict) -> bool:
    """SGLang, where it runs, has only to do with the pool here."""
    return "SGLang" not in target["legendFormat"] or (HAS_SGLANG and not re.search(NOT_OF_SGLANG, target["expr"]))


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_has_data(panel: dict, seen: Seen) -> None:
    empty = [target for target in panel["targets"] if not values(seen, target["expr"])]
    assert [target["legendFormat"] for target in empty if is_expected(target)] == []


@needs_browser
def test_every_panel_is_drawn_with_its_data(seen: Seen, logs: Path) -> None:
    answers = {
        panel["id"]: [
            {"refId": target["refId"], "legend": target["legendFormat"], "result": answer(seen, target["expr"])}
            for target in panel["targets"]
        ]
        for panel in panels()
    }
    picture = logs / "dashboard.png"
    picture.unlink(missing_ok=True)
    found = drawn(dashboard(), answers, seen.start_s, seen.end_s, picture)
    assert [panel["title"] for panel in panels() if not has_data(found.get(panel["id"], ""))] == []
    assert picture.stat().st_size > 0


def test_alerts_fire_on_what_happens_and_on_nothing_else(seen: Seen) -> None:
    wait_for(lambda: seen.prometheus.firing() >= PROVOKED, f"{PROVOKED} fire")
    assert not seen.prometheus.firing() & NOT_PROVOKED
