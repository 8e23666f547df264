"""How the command line writes: results to stdout, everything else to stderr, numbers for people."""

import json
import sys
from typing import Any

import typer
from rich.console import Console

EXIT_FAILED = 1
EXIT_DAMAGED = 3


def print_error(message: str) -> None:
    """One line on stderr, never wrapped, so that scripts can match it."""
    typer.secho(f"error: {message}", err=True, fg=typer.colors.RED)


def print_json(value: Any) -> None:
    """One JSON value on stdout, indented for the eye and for `jq` alike."""
    typer.echo(json.dumps(value, indent=2))


def console() -> Console:
    """For tables: stdout, as wide as the terminal; wide enough for everything where there is none."""
    return Console(width=None if sys.stdout.isatty() else 160)


def error_console() -> Console:
    """For progress: stderr."""
    return Console(stderr=True)


def human_seconds(seconds: float) -> str:
    """ "12 s", "3 min", "5.2 h", "8.0 d"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"


def human_share(part: int, whole: int) -> str:
    """ "62.5%", or "-" of nothing."""
    return f"{100 * part / whole:.1f}%" if whole else "-"
