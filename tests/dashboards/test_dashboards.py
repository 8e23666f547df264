"""What is exported for Prometheus and Grafana: it is valid, in step with the code, and names metrics that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from typer.testing import CliRunner

from dashboards.grafana import WIDTH, dashboard_text
from dashboards.panels import METRICS, ROWS
from dashboards.prometheus import needs_prometheus, promtool
from dashboards.queries import alert_rules, dashboard, metrics_of, panels
from mooncake_connector import dashboards
from mooncake_connector.cli.main import app
from mooncake_connector.dashboards import FILES, ExportError, export
from mooncake_connector.metrics.registry import POOL, PREFIX, SGLANG, TIER, VLLM, VLLM_PREFIX, Kind, Metric

ENGINES = {
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_by_source_total",
    "sglang:cached_tokens_total",
    "sglang:prompt_tokens_total",
}
"""Of the engines themselves; that they are there tests/e2e/test_dashboards.py shows."""
OF_PROMETHEUS = {"up"}


def series_of(metric: Metric, prefix: str) -> set[str]:
    name = metric.series(prefix)
    return {f"{name}_{part}" for part in ("bucket", "count", "sum")} if metric.kind is Kind.HISTOGRAM else {name}


def known() -> set[str]:
    ours = [(metric, VLLM_PREFIX) for metric in VLLM]
    ours += [(metric, PREFIX) for metric in (*SGLANG, *POOL, *TIER)]
    return set().union(*(series_of(metric, prefix) for metric, prefix in ours)) | ENGINES | OF_PROMETHEUS


class TestExport:
    def test_writes_every_file_and_says_what_each_is(self, tmp_path: Path) -> None:
        folder = tmp_path / "not" / "there"
        result = CliRunner().invoke(app, ["dashboards", "export", str(folder)])
        assert result.exit_code == 0
        assert {path.name for path in folder.iterdir()} == set(FILES)
        assert [f"{folder / name}: {what}" for name, what in FILES.items()] == result.stdout.splitlines()

    def test_json_lists_the_files(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path), "--json"])
        assert json.loads(result.stdout) == {"files": [str(tmp_path / name) for name in FILES]}

    def test_keeps_what_a_person_changed(self, tmp_path: Path) -> None:
        export(tmp_path)
        (tmp_path / "alerts.yml").write_text("mine")
        (tmp_path / "grafana.json").unlink()
        with pytest.raises(ExportError, match=r"alerts\.yml is there and differs: --replace"):
            export(tmp_path)
        assert not (tmp_path / "grafana.json").exists()
        assert (tmp_path / "alerts.yml").read_text() == "mine"
        result = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path), "--replace"])
        assert result.exit_code == 0
        assert (tmp_path / "alerts.yml").read_text() == dashboards.text_of("alerts.yml")

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        result = CliRunner().invoke(app, ["dashboards", "export", str(tmp_path / "file" / "below")])
        assert result.exit_code == 1
        said = f"error: the dashboards cannot be written to {tmp_path}/file/below (Not a directory): name another"
        assert said in result.stderr


class TestDashboard:
    def test_it_is_what_the_panels_generate(self) -> None:
        generated = dashboard_text(ROWS, METRICS)
        command = "PYTHONPATH=tests python -m dashboards > mooncake_connector/dashboards/grafana.json"
        assert dashboards.text_of("grafana.json") == generated, f"run: {command}"

    def test_grafanas_own_schema_has_every_field(self) -> None:
        """A field that it does not know would be lost on the way."""
        assert json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder)) == dashboard()

    def test_a_field_that_grafana_does_not_know_is_noticed(self) -> None:
        strange = {**dashboard(), "colour": "red"}
        assert json.loads(json.dumps(Dashboard.from_json(strange), cls=JSONEncoder)) != strange

    def test_panels_do_not_overlap_and_fill_their_rows(self) -> None:
        taken: dict[tuple[int, int], str] = {}
        for panel in dashboard()["panels"]:
            place = panel["gridPos"]
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    assert (x, y) not in taken, f"{panel['title']} over {taken[x, y]}"
                    taken[x, y] = panel["title"]
        assert {x for x, _ in taken} == set(range(WIDTH))
        assert len(taken) == WIDTH * (1 + max(y for _, y in taken))

    def test_every_panel_says_what_it_shows(self) -> None:
        assert [panel["title"] for panel in panels() if not panel["description"]] == []


class TestMetrics:
    @pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
    def test_a_panel_names_metrics_that_exist(self, panel: dict) -> None:
        named = set().union(*(metrics_of(target["expr"]) for target in panel["targets"]))
        assert named
        assert named <= known()

    @pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
    def test_an_alert_names_metrics_that_exist(self, rule: dict) -> None:
        named = metrics_of(rule["expr"])
        assert named
        assert named <= known()

    @pytest.mark.parametrize(
        "expr, names",
        [
            ("sum by (le) (rate(a_total{b=~\"c\"}[5m])) / d", {"a_total", "d"}),
            ('histogram_quantile(0.5, sum by (x) (rate(e_bucket[$__rate_interval])))', {"e_bucket"}),
            ('rate({__name__=~"(vllm:)?f_total", cause="g"}[5m]) or vector(0)', {"f_total", "vllm:f_total"}),
            ('avg({instance="i",__name__=~"sglang[:_]h"}) / d', {"sglang:h", "d"}),
        ],
    )  # fmt: skip
    def test_names_are_found(self, expr: str, names: set[str]) -> None:
        assert metrics_of(expr) == names


@needs_prometheus
class TestPrometheus:
    def test_takes_the_scrape_example_and_the_rules(self, tmp_path: Path) -> None:
        export(tmp_path)
        ended = promtool("check", "config", tmp_path / "prometheus.yml")
        assert ended.returncode == 0, ended.stderr
        assert f"SUCCESS: {len(alert_rules())} rules found" in ended.stdout

    def test_a_rule_that_is_wrong_is_noticed(self, tmp_path: Path) -> None:
        export(tmp_path)
        rules = yaml.safe_load((tmp_path / "alerts.yml").read_text())
        rules["groups"][0]["rules"][0]["expr"] = "rate("
        (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
        assert promtool("check", "config", tmp_path / "prometheus.yml").returncode != 0
