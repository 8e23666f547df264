"""How a benchmark tells how far it is: one line on stderr each."""

from __future__ import annotations

import sys

import typer

from mooncake_connector.cli.output import styled
from mooncake_connector.log import printable


def say(line: str) -> None:
    """A line; one that begins with WARNING stands out."""
    style = {"fg": "yellow", "bold": True} if line.startswith("WARNING") else {"dim": True}
    typer.echo(styled(printable(line), sys.stderr, **style), err=True)
