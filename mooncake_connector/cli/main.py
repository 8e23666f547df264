"""Entry point of `mooncake-connector`: the command groups, and what becomes of errors."""

import contextlib
import os
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_connector import __version__, quick_start
from mooncake_connector.cli import agent, cluster, config, dashboards, doctor, purge, size, snapshot, store, up
from mooncake_connector.cli.bench import commands as bench
from mooncake_connector.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    Group,
    command_group,
    print_error,
    print_json,
)
from mooncake_connector.cli.record import record
from mooncake_connector.cli.simulate import simulate
from mooncake_connector.cli.top import command as top
from mooncake_connector.cli.why.command import why
from mooncake_connector.errors import MooncakeConnectorError

_HELP = f"""A KV cache that LLM engines share: check the set-up, inspect the pool, measure it.

Quick start, beside an installed vLLM:

\b
{textwrap.indent(quick_start.VLLM, "  ")}

or beside an installed SGLang:

\b
{textwrap.indent(quick_start.SGLANG, "  ")}

\b
Then:
  mooncake-connector doctor vllm   # will vLLM use the pool? or: doctor sglang
  mooncake-connector store stats   # what is in the pool, how often it hits
  mooncake-connector top           # the same, live
  mooncake-connector size DIR      # what the model in DIR takes, how many tokens the pool holds

Every command takes --help. Settings come from the environment (MOONCAKE_CONNECTOR_POOL, ...) and the file that
MOONCAKE_CONNECTOR_CONFIG names.
"""


class _Group(Group):
    """Turns the errors that a person can meet into one line on stderr, and into JSON where that was asked for."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if isinstance(error, BrokenPipeError) or type(error).__module__.partition(".")[0] in ("click", "typer"):
                raise
            message = _message(error)
            print_error(message)
            if ctx.meta.get("json"):
                with contextlib.suppress(OSError):  # stdout itself may be what failed
                    print_json({"error": message})
            raise typer.Exit(EXIT_FAILED) from None


app = command_group(_HELP, _Group, name="mooncake-connector", pretty_exceptions_enable=False)
store.app.command("snapshot")(snapshot.take)
store.app.command("restore")(snapshot.give_back)
store.app.command("purge")(purge.purge)
app.add_typer(store.app, name="store")
app.add_typer(doctor.app, name="doctor")
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(dashboards.app, name="dashboards")
app.command()(agent.agent)
app.command()(record)
app.command()(simulate)
app.command()(size.size)
app.command()(top.top)
app.command()(up.up)
app.command()(why)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mooncake-connector {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _message(error: Exception) -> str:
    if isinstance(error, MooncakeConnectorError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    return f"internal error, {type(error).__name__} in {place}: {error} (please report it with your command)"


def _replace_closed_streams() -> None:
    """A stream that was closed (`>&-`) is None, and its number would be that of the next file, such as a pool's."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 it stays open


def main() -> None:
    """Run the command line; a traceback never reaches the person who typed."""
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # a model's name may hold what the terminal's encoding has not
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        print_error(_message(error))
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
