"""`mooncake-connector doctor`: whether an engine in this environment would use the pool, without starting the engine;
with `--url` how one that runs uses it (`doctor_url`).

What concerns one engine alone is in the `doctor` module of its adapter; configuration and pool are looked at here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mooncake_connector.checks import Check, Verdict, failed, ok, warning
from mooncake_connector.cli import columns as columns_
from mooncake_connector.cli import doctor_url
from mooncake_connector.cli.config import text_of
from mooncake_connector.cli.doctor_rdma import rdma_checks
from mooncake_connector.cli.doctor_transfers import transfer_checks
from mooncake_connector.cli.output import EXIT_FAILED, Json, PoolFolder, command_group, print_json, styled, width
from mooncake_connector.config.schema import Config
from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import ConfigError, PoolError
from mooncake_connector.sizes import human_nbytes
from store_client import EmbeddedStore
from store_client.embedded.folder import (
    Unusable,
    check_capacity,
    choose_default,
    default_capacity_nbytes,
    free_nbytes,
    held_nbytes,
    is_pool,
    overhead_nbytes,
    secure_folder,
)
from store_client.embedded.memory_limit import left_for
from transfer.transports.rdma.settings import RdmaSettings

app = command_group(
    "Check whether an engine would use the pool, or (--url) why a running one hits it as it does.",
    epilog='Exit codes: 0 no check failed, warnings or not; 1 one failed: its line says why and what to do, and with '
    '--json "ok" is false; 2 wrong usage; 130 interrupted.',
)

TransferConfig = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Check this as well, what `vllm serve --kv-transfer-config` is to get."),
]

_DETAIL_COLUMN = 22
_NARROW = 60
_COLOURS = {Verdict.OK: typer.colors.GREEN, Verdict.WARNING: typer.colors.YELLOW, Verdict.FAILED: typer.colors.RED}


@app.callback(invoke_without_command=True)
def running(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="A running server: why its hit rate is what it is, and what to do."),
    ] = None,
    pool: PoolFolder = None,
    as_json: Json = False,
) -> None:
    """Check whether an engine would use the pool, without starting it, or (--url) why a running one hits it as it does.

    \b
    Examples:
      mooncake-connector doctor vllm
      mooncake-connector doctor --url http://localhost:8000
    """
    if context.invoked_subcommand is not None:
        if url is not None or pool is not None:
            raise typer.BadParameter("--url and --pool are of a running server: leave the engine out")
        if as_json:
            raise typer.BadParameter(f"write it behind {context.invoked_subcommand}", param_hint="--json")
        return
    if url is None:
        raise typer.BadParameter("name an engine that is installed here (vllm or sglang), or --url of a running server")
    _report(doctor_url.run(url, pool), as_json, {"url": url})


@app.command()
def vllm(as_json: Json = False, kv_transfer_config: TransferConfig = None) -> None:
    """vLLM in this environment: its version, our plugin and connector in it, the configuration, the pool, transfers.

    Exit code 1 where something will not work.
    """
    _examine("vllm", "vllm_plugin.doctor", as_json, kv_transfer_config, transfers=True)


@app.command()
def sglang(as_json: Json = False) -> None:
    """SGLang in this environment: its version, our hooks and backend in it, the configuration, the pool.

    Exit code 1 where something will not work.
    """
    _examine("sglang", "sglang_backend.doctor", as_json)


@app.command()
def rdma(as_json: Json = False) -> None:
    """The transport `rdma` on this machine: its library, cards and their addresses, limits, and what is missing.

    Exit code 1 where it will not work.
    """
    try:
        config = load_config()
    except ConfigError as error:
        _report([failed("configuration", str(error))], as_json, {"transport": "rdma"})
        return
    _report(rdma_checks(config.transfer_hosts, RdmaSettings.configured(config)), as_json, {"transport": "rdma"})


def _examine(
    engine: str, module: str, as_json: bool, engine_json: str | None = None, *, transfers: bool = False
) -> None:
    doctor = importlib.import_module(module)
    given = () if engine_json is None else (engine_json,)
    settings = None if engine_json is None else doctor.own_settings(engine_json)
    checks = itertools.chain(_engine_checks(doctor.run(*given)), _own_checks(transfers, settings))
    _report(checks, as_json, {"engine": engine})
    if not as_json:
        typer.echo(f"\nstart it with:\n\n{doctor.START}")


def _report(checks: Iterable[Check], as_json: bool, of: Mapping[str, str]) -> None:
    """Print them as they are found; exit code 1 where one failed.

    Args:
        of: what they are of, in JSON.
    """
    found = []
    for check in checks:
        found.append(check)
        if not as_json:
            print_check(check)
    healthy = all(check.status is not Verdict.FAILED for check in found)
    if as_json:
        print_json({**of, "ok": healthy, "checks": [dataclasses.asdict(check) for check in found]})
    if not healthy:
        raise typer.Exit(EXIT_FAILED)


def print_check(check: Check) -> None:
    """One line, folded between words where the terminal is narrower."""
    status = styled(f"{check.status.value:8}", sys.stdout, fg=_COLOURS[check.status])
    beside = " " * _DETAIL_COLUMN
    columns = width() or sys.maxsize
    if columns < _NARROW:
        detail, head = columns_.folded(check.detail, columns, "  "), f"{check.name}\n"
    else:
        detail, head = columns_.folded(check.detail, columns, beside), f"{check.name:14}"
    typer.echo(status + head + "\n".join(detail).removeprefix(beside))


def _engine_checks(run: Iterator[Check]) -> Iterator[Check]:
    """What the adapter finds, as it finds it; engines talk while they are imported, which belongs on stderr."""
    while True:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check = next(run, None)
            except Exception as error:
                check = failed("doctor", f"could not look further: {type(error).__name__}: {error}")
        if check is None:
            return
        yield check


def _own_checks(transfers: bool, engine_json: Mapping[str, Any] | None) -> Iterator[Check]:
    try:
        config = load_config(engine_json)
    except ConfigError as error:
        yield failed("configuration", str(error))
        return
    changed = {
        field: text_of(field, getattr(config, field))
        for field in Config.__struct_fields__
        if getattr(config, field) != getattr(Config(), field)
    }
    yield ok("configuration", "; ".join(f"{name} = {text}" for name, text in changed.items()) or "defaults")
    if config.prefix_reuse:
        yield from pool_checks(config)
    if transfers:
        yield from transfer_checks(config)


def pool_checks(config: Config) -> Iterator[Check]:
    """The folder that an engine would use, looked at as far as possible without making anything."""
    folder = config.pool
    try:
        if folder is None:
            folder, notice = choose_default(config.capacity)
            if notice:
                yield warning("shared memory", notice)
        check, capacity = _pool(folder, config.capacity)
        yield check
        there = _existing(folder)
        yield ok("room", f"{human_nbytes(free_nbytes(there))} free in {there}")
        if (left := left_for(there)) is not None:
            yield _limit(left, capacity + overhead_nbytes(capacity) - held_nbytes(folder))
    except PoolError as error:
        yield failed("pool", str(error))


def _pool(folder: Path, capacity: int | None) -> tuple[Check, int]:
    """And the capacity that it will have with the next engine. Raises PoolError for a folder that an engine could not
    use either."""
    if not os.path.exists(folder):  # unlike Path.exists, it does not raise for a folder that may not be entered
        parent = _existing(folder)
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PoolError(f"pool folder {folder} cannot be created: {parent} may not be written; set `pool`")
        chosen = check_capacity(parent, capacity, 0)
        return ok("pool", f"{folder} will be made by the first engine, with {human_nbytes(chosen)}"), chosen
    secure_folder(folder)
    if not is_pool(folder):
        chosen = check_capacity(folder, capacity, held_nbytes(folder))
        return ok("pool", f"{folder} will be filled by the first engine, with {human_nbytes(chosen)}"), chosen
    try:
        with EmbeddedStore(folder, rebuild=False) as store:
            stats = store.stats()
        if capacity is not None:
            check_capacity(folder, capacity, held_nbytes(folder), stats.capacity_nbytes)
    except PoolError as error:
        if isinstance(error.__context__, Unusable):
            said = f"{folder} will be rebuilt, empty, by the next engine: {error.__context__}"
            return warning("pool", said), capacity or default_capacity_nbytes(folder)
        raise
    used, whole = human_nbytes(stats.used_nbytes), human_nbytes(stats.capacity_nbytes)
    check = ok("pool", f"{folder}, {used} of {whole} used by {stats.pages} pages")
    return check, capacity or stats.capacity_nbytes


def _limit(left: int, wanted: int) -> Check:
    """`wanted`: what the pool may take besides what it has, which the limit counts already."""
    says = f"control groups leave this process {human_nbytes(left)}"
    if wanted <= left:
        return ok("memory limit", says)
    return warning(
        "memory limit", f"{says}, and the pool may grow by {human_nbytes(wanted)}: it stops before the limit and "
        "evicts; raise the limit (docker --memory, Kubernetes' limits.memory), or set a smaller capacity",
    )  # fmt: skip


def _existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
