"""`mooncake-connector agent`: run the process between the pool and its tiers, look at it, end it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_connector.cli import tables
from mooncake_connector.cli.output import Json, PoolFolder, print_json, print_table, width
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import environ_name, load_config
from mooncake_connector.errors import ConfigError, PoolError
from store_client.agent import lock as lock_
from store_client.agent.process import leave, log_to_stderr, serve
from store_client.agent.start import start_process
from store_client.agent.visit import ask_report, ask_to_stop
from store_client.embedded import EmbeddedStore
from store_client.embedded.folder import AGENT_LOG, choose_default

_READY_S = 60.0
_STOPPED_S = 30.0
_LOOK_AGAIN_S = 0.1


def agent(
    pool: PoolFolder = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Run it here, until SIGTERM: for systemd and containers.")
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show the one that runs; exit code 1 if none.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the one that runs.")] = False,
    as_json: Json = False,
) -> None:
    """Start the agent of the pool, which fetches pages from the configured `tiers` and writes new ones to them.

    Engines start it themselves, unless `agent` is set to `external`.

    \b
    Examples:
      mooncake-connector agent --foreground
      mooncake-connector agent --status
    """
    if foreground + status + stop > 1:
        raise typer.BadParameter("--foreground, --status and --stop exclude each other: give one of them")
    config = load_config()
    folder = pool.absolute() if pool is not None else config.pool or choose_default(config.capacity)[0]
    if status:
        _show(_running(folder), as_json)
    elif stop:
        stopped = ask_to_stop(folder, _STOPPED_S)
        _say({"stopped": stopped}, "the agent has ended" if stopped else f"no agent runs for pool {folder}", as_json)
    else:
        _begin(folder, config, foreground, as_json)


def _begin(folder: Path, config: Config, foreground: bool, as_json: bool) -> None:
    if not config.tiers and not config.agent_http_port:
        raise ConfigError(
            f"no tiers are configured, so there is nothing to do: set {environ_name('tiers')}, or for an index that "
            f"routers ask {environ_name('agent_http_port')}"
        )
    if foreground:
        log_to_stderr(config.log_level)  # also what opening the pool says
    EmbeddedStore(folder, config.capacity, eviction=config.eviction).close()  # there is one from now on
    lock = lock_.hold(folder)
    if lock is None:
        if foreground:
            raise PoolError(f"pool {folder} has an agent already: see `mooncake-connector agent --status`")
    elif foreground:
        leave(serve(folder, config, lock, idle_s=None))
    else:
        try:
            start_process(folder, config, lock)
        finally:
            lock_.let_go(lock)
    _show(_await(folder), as_json)


def _await(folder: Path) -> dict[str, Any]:
    give_up_s = time.monotonic() + _READY_S
    while (report := ask_report(folder)) is None:
        if time.monotonic() > give_up_s:
            raise PoolError(f"the agent of {folder} does not listen after {_READY_S:g} s: see {folder / AGENT_LOG}")
        time.sleep(_LOOK_AGAIN_S)
    return report


def _running(folder: Path) -> dict[str, Any]:
    report = ask_report(folder)
    if report is None:
        raise PoolError(f"no agent runs for pool {folder}")
    return report


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    typer.echo(
        f"agent {report['version']} of pool {report['pool']}: process {report['pid']}, "
        f"{report['users']} engine processes, {report['asked']:,} chains asked for, {report['asks']:,} of them now"
    )
    print_table(tables.tiers_lines(report, width()))


def _say(value: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(value)
    else:
        typer.echo(text)
