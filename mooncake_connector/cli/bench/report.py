"""What `bench store` and `bench transfer` report: figures beside this machine's own limits, as JSON or as a table."""

from __future__ import annotations

import sys

import msgspec
import typer

from mooncake_connector.cli.columns import folded, sheet
from mooncake_connector.cli.output import print_table, styled, width
from mooncake_connector.log import printable

LEGEND_COLUMNS = 160


class Row(msgspec.Struct, frozen=True):
    """One figure. `limit` is this machine's own, in the row's unit; None where there is none."""

    figure: str
    value: float | None
    unit: str
    limit: float | None = None


class Report(msgspec.Struct, frozen=True):
    """One run of a benchmark; the whole of what ``--json`` prints."""

    machine: dict[str, str | int | float | None]
    versions: dict[str, str | None]
    rows: list[Row]

    def to_lines(self, title: str, columns: int | None) -> list[str]:
        """The rows for people, with the ratios to the limits."""
        headings = ["figure~", "value>", "unit", "limit>", "of limit>"]
        rows = [
            (row.figure, number(row.value), row.unit, number(row.limit), ratio(row.value, row.limit))
            for row in self.rows
        ]
        return sheet(title, headings, rows, columns)


def show(report: Report, title: str, legend: str, *, as_json: bool, quick: bool) -> None:
    """Print it on stdout."""
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    columns = width()
    print_table(report.to_lines(title, columns))
    typer.echo()
    if quick:
        legend = f"With --quick the sizes are tiny: this shows that it works, not how fast it is. {legend}"
    for line in folded(legend, columns or LEGEND_COLUMNS):
        typer.echo(line)


def say(line: str) -> None:
    """How far a benchmark is: a line on stderr; one that begins with WARNING stands out."""
    style = {"fg": "yellow", "bold": True} if line.startswith("WARNING") else {"dim": True}
    typer.echo(styled(printable(line), sys.stderr, **style), err=True)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio(value: float | None, base: float | None) -> str:
    return "-" if value is None or base is None or base <= 0 else f"{value / base:.3g}x"
