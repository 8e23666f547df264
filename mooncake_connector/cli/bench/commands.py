"""`mooncake-connector bench`: options, progress on stderr, the report on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.cli.bench.report import say, show
from mooncake_connector.cli.bench.routing.command import routing
from mooncake_connector.cli.bench.serve.command import serve
from mooncake_connector.cli.output import Json, command_group, typed_path

_STORE_LEGEND = "limit: memcpy or a bare LMDB on this machine. Best round of each; rounds alternate."
_TRANSFER_LEGEND = (
    "limit: process_vm_readv of the same pieces (cma), memcpy (shm), sendall/recv_into over one connection (tcp), the "
    "library alone reading the same pieces (nixl, mooncake), perftest's ib_read_bw and ib_read_lat (rdma). "
    "Best round of each; rounds alternate."
)

_DEVICE_LEGEND = (
    "limit: plain copies of as many bytes between page-locked and device memory; of a hit, prefill of the same tokens "
    "by a stack of the model's matmuls and attention; of a decode step, the same step alone. Aimed at: 0.85x each way, "
    "0.75x both at once, 0.1x for a hit of 32,768 tokens of Llama-3-8B, 1.05x for decode steps."
)

Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes: shows that it works, not how fast.")]

Folder = Annotated[
    Path | None,
    typer.Option(parser=typed_path, help="Where to put the temporary pool; default: /dev/shm.", metavar="DIR"),
]

Only = Annotated[
    list[str] | None,
    typer.Option("--transport", help="Only this one; may be given several times. Default: all.", metavar="NAME"),
]

app = command_group("Benchmarks: the store, transfers and whole servers beside this machine's own limits.")
app.command()(serve)
app.command()(routing)


@app.command()
def store(folder: Folder = None, quick: Quick = False, as_json: Json = False) -> None:
    """Speed of the embedded store beside memcpy and a bare LMDB.

    Needs about 1 GiB in /dev/shm and half a minute. Cleans up after itself. Your pool is not touched.
    """
    # Not at the top: other commands should start without this.
    from mooncake_connector.cli.bench import machine
    from mooncake_connector.cli.bench import store as bench

    report = bench.run(folder or machine.default_folder(), bench.QUICK if quick else bench.Scale(), say)
    show(report, "mooncake-connector bench store", _STORE_LEGEND, as_json=as_json, quick=quick)


@app.command()
def transfer(only: Only = None, quick: Quick = False, as_json: Json = False) -> None:
    """Speed of the transports between two processes of this host beside the bare system calls.

    Needs 1 GiB of memory and half a minute. Cleans up after itself; nothing listens beyond loopback.
    """
    from mooncake_connector.cli.bench import transfer as bench
    from mooncake_connector.cli.bench import transfer_scale
    from transfer.transports.registry import transport_class

    for name in only or ():
        transport_class(name)
    report = bench.run(transfer_scale.QUICK if quick else transfer_scale.Scale(), say, only or ())
    show(report, "mooncake-connector bench transfer", _TRANSFER_LEGEND, as_json=as_json, quick=quick)


@app.command()
def device(folder: Folder = None, quick: Quick = False, as_json: Json = False) -> None:
    """Speed of loads and saves between the pool and a GPU's KV cache beside plain copies and a model's own work.

    Needs a GPU, torch and Triton, but no engine: run it in an engine's environment. Takes some minutes, up to 24 GiB in
    /dev/shm and 40 GiB of the GPU's memory. Cleans up after itself. Your pool is not touched.
    """
    from mooncake_connector.cli.bench import device as bench
    from mooncake_connector.cli.bench import machine

    report = bench.run(folder or machine.default_folder(), bench.QUICK if quick else bench.Scale(), say)
    show(report, "mooncake-connector bench device", _DEVICE_LEGEND, as_json=as_json, quick=quick)
