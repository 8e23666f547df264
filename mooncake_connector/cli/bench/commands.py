"""`mooncake-connector bench`: options, progress on stderr, the report on stdout."""

from __future__ import annotations

import enum
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mooncake_connector.cli.bench.machine import describe_machine, describe_versions
from mooncake_connector.cli.bench.report import Report

app = typer.Typer(help="Measure this machine's limit, the store, and its peers, side by side.", no_args_is_help=True)


class Peer(str, enum.Enum):
    """Stores that the benchmark can start and measure beside ours."""

    mooncake = "mooncake"


@app.callback()
def bench() -> None:
    """Measure this machine's limit, the store, and its peers, side by side."""


@app.command()
def store(
    peer: Annotated[Peer | None, typer.Option(help="Also start and measure this store.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Speed of the embedded store against memcpy, a bare LMDB and, with --peer, a real Mooncake Store."""
    report = Report(describe_machine(_default_parent()), describe_versions(), [])
    if as_json:
        typer.echo(report.to_json())
    else:
        Console().print(report.to_table("mooncake-connector bench store"))


def _default_parent() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
