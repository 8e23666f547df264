"""Every panel of the dashboard shows what happens, and alerts fire, in a real Prometheus that reads real engines."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboards.drawing import drawn, has_data, needs_browser
from dashboards.prometheus import needs_prometheus
from dashboards.queries import as_asked, dashboard, panels
from long_form import LONG

from e2e.monitored import HAS_SGLANG, Seen, monitored
from e2e.pages import wait_for

WINDOW_S, STEP_S = 10.0, 1.0
SHOWN_S = 120.0 if LONG else 0.0
"""The picture shows at least so much."""
PROVOKED = {"MooncakePagesCorrupt", "MooncakePagesEvictedYoung", "MooncakeTierDown"}
NOT_OF_SGLANG = "connector_(transfers|transport|fetch|failures|evicted_reuse)"

pytestmark = [needs_prometheus, pytest.mark.long]


@pytest.fixture(scope="module")
def seen(qwen3: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with monitored(qwen3, logs, tmp_path_factory.mktemp("monitored")) as found:
        yield found


def answer(seen: Seen, expr: str) -> list[dict]:
    """The series of a query, up to now."""
    seen.check()
    now_s = time.time()
    asked = as_asked(expr, max(WINDOW_S, now_s - seen.start_s), WINDOW_S)
    return seen.prometheus.query_range(asked, seen.start_s, now_s, STEP_S)


def rises(seen: Seen, expr: str) -> bool:
    """Whether a query was above zero at some time: all that is counted is provoked."""
    return any(0 < float(value) < math.inf for series in answer(seen, expr) for _, value in series["values"])


def is_expected(target: dict) -> bool:
    """SGLang, where it runs, has only to do with the pool here; whether a page is missed that was evicted, and that a
    tier does not bring, is a matter of time."""
    if "SGLang" in target["legendFormat"]:
        return HAS_SGLANG and not re.search(NOT_OF_SGLANG, target["expr"])
    return "evicted_reuse" not in target["expr"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_a_panel_shows_what_happens(panel: dict, seen: Seen) -> None:
    for target in filter(is_expected, panel["targets"]):
        wait_for(lambda: rises(seen, target["expr"]), target["legendFormat"], every_s=0.2)  # noqa: B023


@needs_browser
def test_every_panel_is_drawn_with_its_data(seen: Seen, logs: Path) -> None:
    time.sleep(max(0.0, seen.start_s + SHOWN_S - time.time()))
    answers = {
        panel["id"]: [
            {"refId": target["refId"], "legend": target["legendFormat"], "result": answer(seen, target["expr"])}
            for target in panel["targets"]
        ]
        for panel in panels()
    }
    picture = logs / "dashboard.png"
    picture.unlink(missing_ok=True)
    found = drawn(dashboard(), answers, seen.start_s, time.time(), picture)
    assert [panel["title"] for panel in panels() if not has_data(found.get(panel["id"], ""))] == []
    assert picture.stat().st_size > 0


def test_alerts_fire_on_what_happens(seen: Seen) -> None:
    wait_for(lambda: seen.prometheus.firing() >= PROVOKED, f"{PROVOKED} fire", every_s=0.2)
