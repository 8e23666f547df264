"""Each alert rule fires on what it is for, and not on what resembles it: by Prometheus's own unit tests of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.prometheus import needs_prometheus, promtool
from dashboards.queries import alert_rules
from mooncake_connector.dashboards import export

VLLM, SGLANG, AGENT = "vllm:mooncake_connector_", "mooncake_connector_", 'instance="host:9400"'
OF_VLLM = 'instance="host:8000", engine="0", model_name="m"'
OF_SGLANG = 'instance="host:30000"'


def rising(a_minute: float) -> str:
    return f"0+{a_minute:g}x240"


def steady(value: float, minutes: int = 240) -> str:
    return f"{value:g}+0x{minutes}"


@dataclass(frozen=True)
class Case:
    """Series, a value each minute, and after `minutes` the alert with these labels and this summary, or none.

    The series with the same names in `quiet` have values of which the alert must not fire.
    """

    alert: str
    series: Mapping[str, str]
    quiet: Mapping[str, str]
    summary: str
    labels: Mapping[str, str] = field(default_factory=lambda: {"instance": "host:8000"})
    minutes: int = 60


def loads(of: str, labels: str, a_minute: float) -> dict[str, str]:
    return {f"{of}{kind}_duration_seconds_count{{{labels}}}": rising(a_minute) for kind in ("load", "save")}


def ages(young: float, old: float) -> dict[str, str]:
    """Evictions a minute of pages that were not used for less than a minute, and for some hours."""
    bounds = {"60": young, "900": young, "14400": young + old, "+Inf": young + old}
    name = f"{SGLANG}pool_evicted_age_seconds_bucket"
    return {f'{name}{{{AGENT}, le="{bound}"}}': rising(count) for bound, count in bounds.items()}


CASES = [
    Case(
        "MooncakePoolUnavailable",
        {f'{VLLM}failures_total{{{OF_VLLM}, cause="save_pool_absent"}}': rising(3)},
        {f'{VLLM}failures_total{{{OF_VLLM}, cause="load_page_lost"}}': rising(3)},
        "host:8000 does not reach its pool",
    ),
    Case(
        "MooncakePoolUnavailable",
        {f'{SGLANG}failures_total{{{OF_SGLANG}, operation="lookup", cause="hung"}}': rising(3)},
        {f'{SGLANG}failures_total{{{OF_SGLANG}, operation="load", cause="page_lost"}}': rising(3)},
        "host:30000 does not reach its pool",
        {"instance": "host:30000"},
    ),
    Case(
        "MooncakePoolUnavailable",
        {f'{VLLM}miss_tokens_total{{{OF_VLLM}, reason="unavailable"}}': rising(300)},
        {f'{VLLM}miss_tokens_total{{{OF_VLLM}, reason="never_stored"}}': rising(300)},
        "host:8000 does not reach its pool",
    ),
    Case(
        "MooncakeFailures",
        {f'{VLLM}failures_total{{{OF_VLLM}, cause="load_page_lost"}}': rising(4), **loads(VLLM, OF_VLLM, 10)},
        {f'{VLLM}failures_total{{{OF_VLLM}, cause="load_page_lost"}}': rising(0.2), **loads(VLLM, OF_VLLM, 10)},
        "host:8000: 20% of loads and saves fail",
    ),
    Case(
        "MooncakeFailures",
        {
            f'{SGLANG}failures_total{{{OF_SGLANG}, operation="load", cause="deadline"}}': rising(4),
            **loads(SGLANG, OF_SGLANG, 10),
        },
        {
            f'{SGLANG}failures_total{{{OF_SGLANG}, operation="fetch", cause="failed"}}': rising(4),
            **loads(SGLANG, OF_SGLANG, 10),
        },
        "host:30000: 20% of loads and saves fail",
        {"instance": "host:30000"},
    ),
    Case(
        "MooncakePagesEvictedYoung", ages(young=10, old=1), ages(young=1, old=10),
        "The pool of host:9400 evicts pages 33s after their last use", {"instance": "host:9400"}, 120,
    ),
    Case(
        "MooncakePagesCorrupt",
        {f"{SGLANG}pool_corrupt_pages_total{{{AGENT}}}": f"{steady(0, 30)} {steady(1, 210)}"},
        {f"{SGLANG}pool_corrupt_pages_total{{{AGENT}}}": steady(1)},
        "Pages in the pool of host:9400 did not match their checksums", {"instance": "host:9400"},
    ),
    Case(
        "MooncakeTierDown",
        {f'{SGLANG}tier_up{{{AGENT}, tier="disk"}}': f"{steady(1, 30)} {steady(0, 210)}"},
        {f'{SGLANG}tier_up{{{AGENT}, tier="disk"}}': f"{steady(1, 58)} {steady(0, 210)}"},
        "Tier disk is down, as host:9400 sees it", {"instance": "host:9400", "tier": "disk"},
    ),
    Case(
        "MooncakeAgentDown",
        {f'up{{{AGENT}, job="mooncake-connector-agents"}}': f"{steady(1, 30)} {steady(0, 210)}"},
        {'up{instance="host:8000", job="engines"}': f"{steady(1, 30)} {steady(0, 210)}"},
        "The agent at host:9400 does not answer", {"instance": "host:9400", "job": "mooncake-connector-agents"},
    ),
    Case(
        "MooncakeTransfersFailing",
        {
            f'{VLLM}failures_total{{{OF_VLLM}, cause="fetch_failed"}}': rising(2),
            f"{VLLM}fetches_total{{{OF_VLLM}}}": rising(10),
            f"{VLLM}sends_total{{{OF_VLLM}}}": rising(0),
        },
        {
            f'{VLLM}failures_total{{{OF_VLLM}, cause="load_page_lost"}}': rising(2),
            f"{VLLM}fetches_total{{{OF_VLLM}}}": rising(10),
            f"{VLLM}sends_total{{{OF_VLLM}}}": rising(0),
        },
        "host:8000: 20% of transfers between prefill and decode fail",
    ),
    Case(
        "MooncakeTransfersFailing",
        {
            f'{SGLANG}failures_total{{{OF_SGLANG}, operation="send", cause="expired"}}': rising(2),
            f'{SGLANG}transfers_total{{{OF_SGLANG}, operation="send"}}': rising(10),
        },
        {
            f'{SGLANG}failures_total{{{OF_SGLANG}, operation="load", cause="deadline"}}': rising(2),
            f'{SGLANG}transfers_total{{{OF_SGLANG}, operation="send"}}': rising(10),
        },
        "host:30000: 20% of transfers between prefill and decode fail", {"instance": "host:30000"},
    ),
]  # fmt: skip


def rule(alert: str) -> Mapping[str, Any]:
    (found,) = (one for one in alert_rules() if one["alert"] == alert)
    return found


def unit_test(case: Case, series: Mapping[str, str], fires: bool) -> dict[str, Any]:
    expected = {
        "exp_labels": {**case.labels, "severity": rule(case.alert)["labels"]["severity"]},
        "exp_annotations": {
            "summary": case.summary,
            "description": rule(case.alert)["annotations"]["description"],
        },
    }
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.minutes}m", "alertname": case.alert, "exp_alerts": [expected] if fires else []}
        ],
    }


def checked(folder: Path, *tests: Mapping[str, Any]) -> str:
    """What Prometheus says against these unit tests of the rules; "" where they hold."""
    export(folder, replace=True)
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": list(tests)}))
    ended = promtool("test", "rules", file)
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


@needs_prometheus
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert} {case.labels['instance']}")
def test_an_alert_fires_on_what_it_is_for_and_not_on_what_resembles_it(case: Case, tmp_path: Path) -> None:
    said = checked(tmp_path, unit_test(case, case.series, True), unit_test(case, case.quiet, False))
    assert not said, said


@needs_prometheus
def test_a_rule_that_does_not_fire_is_noticed(tmp_path: Path) -> None:
    case = CASES[0]
    assert "FAILED" in checked(tmp_path, unit_test(case, case.quiet, True))


def test_every_alert_is_tested() -> None:
    assert {case.alert for case in CASES} == {one["alert"] for one in alert_rules()}


def test_every_alert_is_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")
    assert [one["alert"] for one in alert_rules() if f"| `{one['alert']}` |" not in page] == []
