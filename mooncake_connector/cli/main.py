"""Entry point of `mooncake-connector`: the command groups, and what becomes of errors."""

import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mooncake_connector import __version__
from mooncake_connector.cli import bench, doctor, store
from mooncake_connector.cli.output import EXIT_FAILED, print_error
from mooncake_connector.errors import MooncakeConnectorError

_HELP = """Share the KV cache of LLM engines: look into a pool of pages, and measure it.

**Quick start**, beside an installed vLLM:

    vllm serve MODEL --kv-transfer-config \\
      '{"kv_connector": "MooncakeKVConnector", "kv_role": "kv_both"}'

or beside an installed SGLang:

    sglang serve --model-path MODEL --page-size 64 \\
      --enable-hierarchical-cache --hicache-storage-backend mooncake_connector

    mooncake-connector doctor vllm     # whether the engine will use the pool (or: doctor sglang)
    mooncake-connector store stats     # what is in the pool, how often it hits

Every command takes `--help`. Settings come from the environment (`MOONCAKE_CONNECTOR_POOL`, ...) and the file that
`MOONCAKE_CONNECTOR_CONFIG` names.
"""

_EPILOG = (
    "**Exit codes**: 0 done · 1 failed, the reason is on stderr · 2 wrong usage · 3 `store verify` found damaged pages "
    "· 130 interrupted"
)


class _Group(TyperGroup):
    """Turns the errors that a person can meet into one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MooncakeConnectorError as error:
            print_error(str(error))
            raise typer.Exit(EXIT_FAILED) from None


app = typer.Typer(
    name="mooncake-connector",
    cls=_Group,
    help=_HELP,
    epilog=_EPILOG,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(store.app, name="store")
app.add_typer(doctor.app, name="doctor")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mooncake-connector {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a traceback never reaches the person who typed."""
    try:
        app()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        print_error(f"internal error, {type(error).__name__} in {place}: {error} (please report it with your command)")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
