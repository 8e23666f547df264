"""What Prometheus and Grafana are given: a scrape example, alert rules, and a dashboard.

The dashboard is generated (`python -m dashboards` in tests/), the other two are written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from mooncake_connector.errors import MooncakeConnectorError

__all__ = ["FILES", "ExportError", "export", "text_of"]

FILES = {
    "prometheus.yml": "what Prometheus scrapes: an example to adapt",
    "alerts.yml": "alert rules for Prometheus (rule_files)",
    "grafana.json": "a dashboard for Grafana (Dashboards, New, Import)",
}
"""Name -> what it is."""


class ExportError(MooncakeConnectorError):
    """A file could not be written, or is there and differs."""


def text_of(name: str) -> str:
    """Of one of :data:`FILES`."""
    return (files(__package__) / name).read_text("utf-8")


def export(folder: Path, *, replace: bool = False) -> Sequence[Path]:
    """Write all files into a folder, which is made where it is not there; their paths.

    Raises:
        ExportError: nothing is written where a file is there with another content, unless `replace`.
    """
    paths = {folder / name: text_of(name) for name in FILES}
    try:
        if not replace:
            for path, text in paths.items():
                if path.exists() and path.read_bytes() != text.encode():
                    raise ExportError(f"{path} is there and differs: --replace overwrites it, or name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text, "utf-8")
    except OSError as error:
        why = error.strerror or error
        raise ExportError(f"the dashboards cannot be written to {folder} ({why}): name another folder") from error
    return list(paths)
