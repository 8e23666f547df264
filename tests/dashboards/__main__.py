"""Prints the dashboard: python -m dashboards > mooncake_connector/dashboards/grafana.json."""

from dashboards.grafana import dashboard_text
from dashboards.panels import METRICS, ROWS

print(dashboard_text(ROWS, METRICS), end="")
