"""The queries of the dashboard and of the alert rules as they are shipped, and the metrics that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import yaml

from mooncake_connector.dashboards import text_of

__all__ = ["alert_rules", "as_asked", "dashboard", "metrics_of", "panels"]


def dashboard() -> dict[str, Any]:
    return dict(json.loads(text_of("grafana.json")))


def panels() -> list[dict[str, Any]]:
    """All that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def alert_rules() -> list[Mapping[str, Any]]:
    (group,) = yaml.safe_load(text_of("alerts.yml"))["groups"]
    return list(group["rules"])


def as_asked(expr: str, over_s: float, window_s: float) -> str:
    """The query as Grafana sends it for all instances: `over_s` is the time shown, `window_s` its rate interval."""
    values = {"$__rate_interval": f"{window_s:.0f}s", "$__range": f"{over_s:.0f}s", "$instance": ".*"}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def metrics_of(expr: str) -> set[str]:
    """Names of metrics in PromQL, also of those that are chosen by a regular expression with `(vllm:)?` or
    `sglang[:_]`."""
    named = re.findall(r'__name__=~"\(vllm:\)\?(\w+)"', expr)
    sglangs = re.findall(r'__name__=~"sglang\[:_\](\w+)"', expr)
    plain = re.sub(r'\{[^}]*\}|\[[^\]]*\]|\b(?:by|without|on|group_left|group_right)\s*\([^)]*\)', " ", expr)
    words = set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", plain)) - {"and", "or", "unless", "bool"}
    return words.union(named, (f"vllm:{name}" for name in named), (f"sglang:{name}" for name in sglangs))
