"""`mooncake-connector dashboards`: what Prometheus and Grafana are given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector import dashboards as dashboards_
from mooncake_connector.cli.output import Json, command_group, print_json, typed_path

app = command_group("A Grafana dashboard, Prometheus alert rules and a scrape example.")


@app.callback()
def dashboards() -> None:
    """A Grafana dashboard, Prometheus alert rules and a scrape example."""


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=typed_path, help="Made where it is not there.")],
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite files that differ.")] = False,
    as_json: Json = False,
) -> None:
    """Write the dashboard, the alert rules and the scrape example into a folder.

    \b
    Examples:
      mooncake-connector dashboards export monitoring
      mooncake-connector dashboards export monitoring --replace     # after an upgrade
    """
    paths = dashboards_.export(folder, replace=replace)
    if as_json:
        print_json({"files": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(f"{path}: {dashboards_.FILES[path.name]}")
