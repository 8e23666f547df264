"""How the command line writes: results to stdout, everything else to stderr, numbers for people."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO

import typer
from rich.console import Console
from typer.core import TyperGroup

from mooncake_connector.log import printable

EXIT_FAILED = 1
EXIT_DAMAGED = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = (
    'Exit codes: 0 done; 1 failed, the reason is on stderr, and with --json on stdout as {"error": ...}; 2 wrong '
    "usage; 3 `store verify` or `store restore` found damaged pages; 130 interrupted."
)


class Group(TyperGroup):
    """Commands whose list in the help is not cut to the width of the terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command_group(help: str, cls: type[Group] = Group, *, epilog: str = EXIT_CODES, **more: Any) -> typer.Typer:
    """Commands with help in plain text: its examples keep their lines, and nothing is cut in a narrow terminal."""
    columns = max(30, min(shutil.get_terminal_size().columns, 100))
    return typer.Typer(
        help=help, cls=cls, epilog=epilog, no_args_is_help=True, rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "terminal_width": columns}, **more,
    )  # fmt: skip


def typed_path(text: str) -> Path:
    """A path that was typed, `~` expanded. "" is a variable that was not set, and never means the current folder."""
    if not text or "\0" in text:
        raise typer.BadParameter("it is empty: name a path, or leave the option out")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise typer.BadParameter(f"{text!r}: {user} has no home folder: write the path out, or ./{user}") from None


def _note_json(context: typer.Context, wanted: bool) -> bool:
    context.meta["json"] = wanted
    return wanted


PoolFolder = Annotated[
    Path | None,
    typer.Option(
        "--pool", "-p", metavar="DIR", parser=typed_path, show_default=False,
        help="Pool folder. Default: the configured one, else /dev/shm/mooncake-connector-UID.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", callback=_note_json, help="Print JSON instead of text.")]


def styled(text: str, stream: TextIO, **style: Any) -> str:
    """`text` in colour where `stream` is a terminal that may show it."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    return text if plain else typer.style(text, **style)


def print_error(message: str) -> None:
    """One line on stderr, never wrapped, so that scripts can match it; a stranger's words in it steer no terminal."""
    typer.echo(styled(f"error: {printable(message)}", sys.stderr, fg="red"), err=True)


def fail(reason: str) -> NoReturn:
    """Ends the command: the first line is the error, the others follow it on stderr."""
    first, *others = reason.splitlines()
    print_error(first)
    for line in others:
        typer.echo(printable(line), err=True)
    raise typer.Exit(EXIT_FAILED)


def print_json(value: Any) -> None:
    """One JSON value on stdout, indented for the eye and for `jq` alike."""
    typer.echo(json.dumps(value, indent=2))


def print_table(lines: Iterable[str]) -> None:
    """What `columns` made; the first line is the title."""
    for number, line in enumerate(lines):
        typer.echo(line if number else styled(line, sys.stdout, bold=True))


def width() -> int | None:
    """Columns of the terminal; None where stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


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
