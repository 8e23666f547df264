"""`mooncake-connector cluster up`: a Mooncake cluster on this machine, for trying it out."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.cli.output import command_group, fail, typed_path
from mooncake_connector.deploy.supervisor import Supervisor
from mooncake_connector.sizes import human_nbytes, parse_nbytes
from store_client.tiers.mooncake.cluster import LOOPBACK, commands

_TICK_S = 0.2
_START_S, _SILENCE_S = 120.0, 120.0
_LEAST_NBYTES = 16 << 20

app = command_group("A Mooncake cluster on this machine, for trying it out.")


@app.callback()
def _group() -> None:
    """Keeps `up` a command of its own."""


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from None


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="How many nodes hold the memory.")] = 2,
    memory: Annotated[int, typer.Option(parser=_nbytes, metavar="SIZE", help="Memory of all nodes together.")] = "4GiB",  # type: ignore[assignment]
    logs: Annotated[
        Path | None,
        typer.Option(parser=typed_path, metavar="DIR", help="Folder for logs; without it they go with the cluster."),
    ] = None,
) -> None:
    """Run a Mooncake master and nodes on this machine until Ctrl-C, and say how to use them.

    \b
    Example:
      mooncake-connector cluster up --nodes 2 --memory 4GiB
    """
    if memory < nodes * _LEAST_NBYTES:
        least = human_nbytes(_LEAST_NBYTES)
        raise typer.BadParameter(f"{human_nbytes(memory)} for {nodes} nodes: each needs {least}", param_hint="--memory")
    if logs is not None:
        _run(nodes, memory, logs)
        return
    with tempfile.TemporaryDirectory(prefix="mooncake-cluster-") as folder:
        _run(nodes, memory, Path(folder))


def _run(nodes: int, memory: int, logs: Path) -> None:
    """Until somebody ends it, or the master or all nodes are given up."""
    run = commands(nodes, memory // nodes)
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # `nohup` wants it to go on
            signal.signal(number, lambda one, frame: asked.append(one))
    supervisor = Supervisor(
        run, engine="", needed={"master", "node"}, logs=logs, start_at_once=1, start_deadline_s=_START_S,
        silence_deadline_s=_SILENCE_S, say=_say,
    )  # fmt: skip
    try:
        greeted = False
        while not asked and supervisor.failure is None:
            supervisor.tick()
            if supervisor.is_ready and not greeted:
                greeted = True
                _say(welcome(run[0].listens[0][1], nodes, memory))
            time.sleep(_TICK_S)
    finally:
        _say("stopping; once more to stop at once" if asked else "stopping")
        supervisor.stop(lambda: len(asked) > 1)
    _say("all processes have ended")
    if supervisor.failure is not None:
        fail(supervisor.failure)


def welcome(port: int, nodes: int, memory: int) -> str:
    """What to paste where, and what to run where it is more than a trial."""
    entry = {"kind": "mooncake", "master": f"{LOOPBACK}:{port}"}
    return f"""
The cluster is ready: {nodes} nodes with {human_nbytes(memory // nodes)} each. For every engine on this machine:

  export MOONCAKE_CONNECTOR_TIERS='{json.dumps([entry])}'

or in the configuration file:

  tiers:
    - {{kind: mooncake, master: "{LOOPBACK}:{port}"}}

The nodes listen on all addresses (0.0.0.0), whatever is set, and ask nobody who they are: let no stranger reach their
ports. Pages are in memory alone and are gone when this ends, which Ctrl-C does.

On real hosts, the first on one of them, the second on each that gives memory (docs/fleet.md):

  mooncake_master --rpc_address=MASTER --rpc_port=50051
  mooncake_client --host=THIS_HOST --global_segment_size=64GB --metadata_server=P2PHANDSHAKE \\
      --master_server_address=MASTER:50051 --protocol=rdma --device_names=mlx5_0
"""


def _say(text: str) -> None:
    """The cluster goes on, and is stopped to the end, also where its words cannot be written any more."""
    try:
        typer.echo(text)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
