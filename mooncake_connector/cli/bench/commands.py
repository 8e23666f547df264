"""`mooncake-connector bench`: options, progress on stderr, the report on stdout."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Measure this machine's limit, the store, and its peers, side by side.", no_args_is_help=True)

_TITLE = "mooncake-connector bench store"
_LEGEND = (
    "limit: memcpy or a bare LMDB on this machine; peer: the Mooncake Store between two processes, the better of its "
    "connection pool on and off.\nBest round of each, rounds interleaved; ok ? = a part of the goal was not measured."
)


class Peer(str, enum.Enum):
    """Stores that the benchmark can start and measure beside ours."""

    mooncake = "mooncake"


@app.callback()
def bench() -> None:
    """Measure this machine's limit, the store, and its peers, side by side."""


@app.command()
def store(
    peer: Annotated[Peer | None, typer.Option(help="Also start and measure this store.")] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(help="Python that has the peer's wheel; default: this one.", metavar="PATH"),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(help="Python that has vLLM and this package: adds the two vLLM rows.", metavar="PATH"),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint that vLLM serves for its rows, SmolLM2-135M in our goals.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the temporary pools lie; default: /dev/shm.", metavar="DIR")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that it works: no true figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Speed of the embedded store against memcpy, a bare LMDB and, with --peer, a real Mooncake Store.

    Needs about 3 GiB in /dev/shm and a minute, with a peer two, with vLLM ten. Nothing of it stays. Your pool is not
    touched.
    """
    # Not at the top: other commands should start without this.
    from mooncake_connector.cli.bench import store_bench
    from mooncake_connector.cli.bench.measure import Scale
    from mooncake_connector.cli.bench.vllm_rows import Engine

    if peer_python is not None and peer is None:
        raise typer.BadParameter("it has no use without --peer mooncake", param_hint="--peer-python")
    if vllm_python is None and model is not None:
        raise typer.BadParameter("it has no use without --vllm-python", param_hint="--model")
    if vllm_python is not None and (model is None or not (model / "config.json").is_file()):
        reason = f"{model} has no config.json" if model else "it is missing"
        raise typer.BadParameter(f"{reason}: --vllm-python needs the folder of a checkpoint", param_hint="--model")
    stderr = Console(stderr=True)
    report = store_bench.run(
        folder or store_bench.default_folder(),
        store_bench.QUICK if quick else Scale(),
        peer_python=str(peer_python or store_bench.default_peer_python()) if peer else None,
        vllm=Engine(vllm_python, model) if vllm_python and model else None,
        progress=lambda line: stderr.print(line, style="bold yellow" if line.startswith("WARNING") else "dim"),
    )
    if as_json:
        typer.echo(report.to_json())
        return
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(report.to_table(_TITLE))
    console.print(_LEGEND)
