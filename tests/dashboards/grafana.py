"""The shape of the Grafana dashboard, by Grafana's own library: rows of panels, each with its queries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.units import (
    BytesIEC,
    BytesPerSecondSI,
    PercentUnit,
    Seconds,
    Short,
)

__all__ = ["BYTES", "BYTES_A_SECOND", "NUMBER", "SECONDS", "SHARE", "Panel", "Query", "Row", "dashboard_text"]

SHARE, SECONDS, BYTES, BYTES_A_SECOND, NUMBER = PercentUnit, Seconds, BytesIEC, BytesPerSecondSI, Short
TITLE, UID = "mooncake-connector", "mooncake-connector"
WIDTH = 24
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and what its series are called: `{{label}}` is the value of a label."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Args:
    kind: `lines` over time, `areas` on top of each other, or a single `number` with its course.
    unit: one of Grafana's; above.
    text: what a person sees behind the panel's "i".
    width: of the 24 columns of a row.
    """

    title: str
    kind: Literal["lines", "areas", "number"]
    unit: str
    text: str
    queries: Sequence[Query]
    width: int = 8

    def built(self, number: int) -> timeseries.Panel | stat.Panel:
        panel = self._number() if self.kind == "number" else self._over_time()
        panel = panel.id(number).title(self.title).description(self.text).datasource(SOURCE).unit(self.unit)
        panel = panel.span(self.width).height(4 if self.kind == "number" else 8).min(0)
        for index, query in enumerate(self.queries):
            asked = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).range()
            panel = panel.with_target(asked.ref_id(chr(ord("A") + index)).datasource(SOURCE))
        if self.kind == "number" and self.unit == NUMBER:
            panel = panel.decimals(0)
        return panel.max(1) if self.unit == SHARE else panel

    @staticmethod
    def _number() -> stat.Panel:
        last = common.ReduceDataOptions().calcs(["lastNotNull"])
        panel = stat.Panel().reduce_options(last).graph_mode(looks.BigValueGraphMode.AREA)
        return panel.color_mode(looks.BigValueColorMode.NONE)

    def _over_time(self) -> timeseries.Panel:
        legend = common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST).show_legend(True)
        tooltip = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI)
        panel = timeseries.Panel().legend(legend.placement(looks.LegendPlacement.BOTTOM)).tooltip(tooltip)
        if self.kind == "areas":
            return panel.fill_opacity(40).stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
        return panel.fill_opacity(8)


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


def dashboard_text(rows: Sequence[Row], metrics: str) -> str:
    """JSON to import in Grafana; `metrics` is a regular expression for the names of all metrics."""
    source = build.DatasourceVariable("datasource").label("Data source").type("prometheus")
    instances = (
        build.QueryVariable("instance").label("Instance").datasource(SOURCE)
        .query(f'label_values({{__name__=~"{metrics}"}}, instance)')
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(".*")
        .current(model.VariableOption(text="All", value="$__all"))
    )  # fmt: skip
    dashboard = (
        build.Dashboard(TITLE).uid(UID).tags(["llm", "kv-cache"]).editable().time("now-1h", "now").refresh("30s")
        .tooltip(model.DashboardCursorSync.CROSSHAIR).with_variable(source).with_variable(instances)
    )  # fmt: skip
    number = 0
    for row in rows:
        number += 1
        dashboard = dashboard.with_row(build.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            dashboard = dashboard.with_panel(panel.built(number))
    return json.dumps(dashboard.build(), cls=JSONEncoder, indent=2) + "\n"
