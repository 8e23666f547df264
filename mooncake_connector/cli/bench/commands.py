"""`mooncake-connector bench`: options, progress on stderr, the report on stdout."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mooncake_connector.cli.bench.progress import say
from mooncake_connector.cli.bench.serve.command import serve
from mooncake_connector.cli.columns import folded
from mooncake_connector.cli.output import EXIT_CODES, HELP_SETTINGS, Group, Json, print_table, typed_path, width

if TYPE_CHECKING:
    from mooncake_connector.cli.bench.report import Report

app = typer.Typer(
    help="Benchmarks: the store, transfers and whole servers beside this machine's limits and other projects.",
    cls=Group,
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=HELP_SETTINGS,
)

_LEGEND_COLUMNS = 160
_QUICK = "With --quick the sizes are tiny: this shows that it works, not how fast it is."

_TITLE = "mooncake-connector bench store"
_LEGEND = (
    "limit: memcpy or a bare LMDB on this machine; peer: the Mooncake Store between two processes, the better of its "
    "connection pool on and off. Best round of each; rounds alternate."
)


_HICACHE_TITLE = "mooncake-connector bench hicache"
_HICACHE_LEGEND = (
    "limit: memcpy in the same rounds; peer: SGLang's in-tree Mooncake backend over TCP, pages in another process, the "
    "better of its connection pool on and off. "
    "Best round of each; rounds alternate."
)


class Peer(str, enum.Enum):
    """Stores that the benchmark can start and measure beside ours."""

    mooncake = "mooncake"


class HicachePeer(str, enum.Enum):
    """SGLang's own backends that the benchmark can measure beside ours."""

    mooncake = "mooncake"
    file = "file"


_TRANSFER_TITLE = "mooncake-connector bench transfer"
_TRANSFER_LEGEND = (
    "limit: process_vm_readv of the same pieces (cma), memcpy (shm), sendall/recv_into over one connection (tcp); "
    "peer: NIXL with UCX's own choice (cma), Mooncake's Transfer Engine at its better setting (tcp). "
    "Best round of each; rounds alternate."
)


class TransferPeer(str, enum.Enum):
    """Transfer libraries that the benchmark can start and measure beside ours."""

    mooncake = "mooncake"
    nixl = "nixl"


_PD_TITLE = "mooncake-connector bench pd"
_PD_LEGEND = (
    "limit: the decode instance alone; peer: vLLM's NixlConnector between two servers of its own, prefill first, the "
    "better of its num_threads 4 (its default) and 0. Medians; rounds alternate."
)


class PDPeer(str, enum.Enum):
    """vLLM's own connectors that the benchmark can measure beside ours."""

    nixl = "nixl"


@app.callback()
def bench() -> None:
    """Benchmarks: the store, transfers and whole servers beside this machine's limits and other projects."""


app.command()(serve)


@app.command()
def store(
    peer: Annotated[Peer | None, typer.Option(help="Also start and measure this store.")] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Python that has the peer's wheel; default: this one.", metavar="PATH"),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(
            parser=typed_path, help="Python that has vLLM and this package: adds the two vLLM rows.", metavar="PATH"
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Checkpoint that vLLM serves for its rows, SmolLM2-135M in our goals."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Where to put the temporary pools; default: /dev/shm.", metavar="DIR"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, not how fast.")] = False,
    as_json: Json = False,
) -> None:
    """Speed of the embedded store against memcpy, a bare LMDB and, with --peer, a real Mooncake Store.

    Needs about 3 GiB in /dev/shm and a minute, with a peer two, with vLLM ten. Cleans up after itself. Your pool is
    not touched.
    """
    # Not at the top: other commands should start without this.
    from mooncake_connector.cli.bench import machine, store_bench
    from mooncake_connector.cli.bench.measure import Scale
    from mooncake_connector.cli.bench.vllm_rows import Engine

    if peer_python is not None and peer is None:
        raise typer.BadParameter("needs --peer mooncake", param_hint="--peer-python")
    if vllm_python is None and model is not None:
        raise typer.BadParameter("needs --vllm-python", param_hint="--model")
    if vllm_python is not None and (model is None or not (model / "config.json").is_file()):
        reason = f"{model} has no config.json" if model else "it is missing"
        raise typer.BadParameter(f"{reason}: --vllm-python needs the folder of a checkpoint", param_hint="--model")
    report = store_bench.run(
        folder or machine.default_folder(),
        store_bench.QUICK if quick else Scale(),
        peer_python=str(peer_python or sys.executable) if peer else None,
        vllm=Engine(vllm_python, model) if vllm_python and model else None,
        progress=say,
    )
    _show(report, _TITLE, _LEGEND, as_json=as_json, quick=quick)


@app.command()
def hicache(
    peer: Annotated[
        list[HicachePeer] | None, typer.Option(help="Also measure this backend of SGLang's; may be given twice.")
    ] = None,
    sglang_python: Annotated[
        Path | None,
        typer.Option(
            parser=typed_path, help="Python that has SGLang and this package; default: this one.", metavar="PATH"
        ),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Python that has the Mooncake wheel; default: this one.", metavar="PATH"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Where to put the temporary pools; default: /dev/shm.", metavar="DIR"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, not how fast.")] = False,
    as_json: Json = False,
) -> None:
    """Speed of SGLang's L3 calls on its own host pools: our backend, memcpy and, with --peer, SGLang's own backends.

    Needs about 4 GiB in /dev/shm, 5 GiB of other memory and two minutes, with both peers ten. Cleans up after itself.
    Your pool is not touched. No GPU is needed.
    """
    from mooncake_connector.cli.bench import hicache_bench, machine
    from mooncake_connector.cli.bench.hicache_scale import HicacheScale

    if peer_python is not None and HicachePeer.mooncake not in (peer or ()):
        raise typer.BadParameter("needs --peer mooncake", param_hint="--peer-python")
    report = hicache_bench.run(
        folder or machine.default_folder(),
        hicache_bench.QUICK if quick else HicacheScale(),
        sglang=sglang_python or Path(sys.executable),
        peers={item.value for item in peer or ()},
        peer_python=str(peer_python or sys.executable),
        progress=say,
    )
    _show(report, _HICACHE_TITLE, _HICACHE_LEGEND, as_json=as_json, quick=quick)


@app.command()
def transfer(
    peer: Annotated[list[TransferPeer] | None, typer.Option(help="Also measure this; may be given twice.")] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Python that has the peers' wheels; default: this one.", metavar="PATH"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, not how fast.")] = False,
    as_json: Json = False,
) -> None:
    """Speed of the transports between two processes against the bare system calls and, with --peer, other libraries.

    Needs 1 GiB of memory and a minute, with both peers two. The rows over two links of 1 Gbit/s take root: they make
    two network namespaces. Cleans up after itself; nothing listens beyond loopback and those links.
    """
    from mooncake_connector.cli.bench import transfer_bench, transfer_scale

    if peer_python is not None and not peer:
        raise typer.BadParameter("needs --peer", param_hint="--peer-python")
    report = transfer_bench.run(
        transfer_scale.QUICK if quick else transfer_scale.TransferScale(),
        peers={item.value for item in peer or ()},
        peer_python=str(peer_python or sys.executable),
        progress=say,
    )
    _show(report, _TRANSFER_TITLE, _TRANSFER_LEGEND, as_json=as_json, quick=quick)


@app.command()
def pd(
    vllm_python: Annotated[
        Path, typer.Option(parser=typed_path, help="Python that has vLLM and this package.", metavar="PATH")
    ],
    model: Annotated[Path, typer.Option(parser=typed_path, help="Checkpoint that all instances serve.", metavar="DIR")],
    peer: Annotated[PDPeer | None, typer.Option(help="Also measure this connector.")] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(parser=typed_path, help="Python that has the peer's wheel; default: this one.", metavar="PATH"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round: shows that it works, not how fast it is.")] = False,
    as_json: Json = False,
) -> None:
    """What a prefill and a decode instance of real vLLM add to a request, against one instance alone.

    Starts two servers at a time on this machine, on the CPU or whatever vLLM finds; with the peer six in all. Takes
    some minutes. Nothing listens beyond loopback.
    """
    from mooncake_connector.cli.bench import vllm_pd
    from mooncake_connector.cli.bench.vllm_rows import Engine

    if peer_python is not None and peer is None:
        raise typer.BadParameter("needs --peer nixl", param_hint="--peer-python")
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"{model} has no config.json: name the folder of a checkpoint", param_hint="--model")
    report = vllm_pd.run(
        Engine(vllm_python, model),
        str(peer_python or sys.executable) if peer else None,
        vllm_pd.QUICK if quick else vllm_pd.PDScale(),
        say,
    )
    _show(report, _PD_TITLE, _PD_LEGEND, as_json=as_json, quick=quick)


def _show(report: Report, title: str, legend: str, *, as_json: bool, quick: bool) -> None:
    if quick:
        report, legend = report.without_verdicts(), f"{_QUICK} {legend}"
    if as_json:
        typer.echo(report.to_json())
        return
    columns = width()
    print_table(report.to_lines(title, columns))
    typer.echo()
    for line in folded(legend, columns or _LEGEND_COLUMNS):
        typer.echo(line)
    if any(row.goal for row in report.rows):
        typer.echo("ok ?: a part of the goal was not measured.")
