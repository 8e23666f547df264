"""`mooncake-connector store snapshot` and `restore`: the pool to a folder and back, over a reboot or an upgrade."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import rich.progress
import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli.output import EXIT_DAMAGED, Json, PoolFolder, error_console, print_json, typed_path
from mooncake_connector.cli.store import Which
from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import PoolError
from mooncake_connector.sizes import human_nbytes
from store_client import EmbeddedStore
from store_client.base import Progress
from store_client.embedded.locks import LockTimeout
from store_client.snapshot import Snapshot, restore, take_snapshot

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", parser=typed_path, help="Folder of the snapshot.", show_default=False)
]


def take(folder: Folder, pool: PoolFolder = None, namespace: Which = None, as_json: Json = False) -> None:
    """Save the pool to a folder, for `store restore` after a reboot or an upgrade. Engines keep running.

    A snapshot that is in DIR is replaced once the new one is whole and on the disk; any other folder is refused.
    What engines evict meanwhile is left out. An empty pool is not saved.

    \b
    Examples:
      mooncake-connector store snapshot /var/lib/mooncake-connector/snapshot
      mooncake-connector store snapshot /mnt/backup/kv --namespace 3f9a1c --json
    """
    started_s = time.monotonic()
    with pool_.opened(pool) as store, _bar("saving") as progress:
        report = take_snapshot(store, folder, pool_.find_namespace(store, namespace), progress)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        print_json({**dataclasses.asdict(report), "seconds": elapsed_s})
        return
    if report.remains:
        typer.echo("the remains of a snapshot that was not finished were removed", err=True)
    if report.pages:
        verb = "replaced" if report.replaced else "saved"
        typer.echo(f"{verb} {report.path}: {report.pages:,} pages, {_speed(report.nbytes, elapsed_s)}")
    else:
        typer.echo(f"the pool has no pages to save; {report.path} is as it was")
    for count, why in (
        (report.changed_pages, "changed meanwhile"),
        (report.corrupt_pages, "did not match their checksum"),
        (report.unnamed_pages, "belong to no namespace that the pool knows"),
    ):
        if count:
            typer.echo(f"left out: {count:,} pages that {why}")


def give_back(folder: Folder, pool: PoolFolder = None, namespace: Which = None, as_json: Json = False) -> None:
    """Give the pages of a snapshot back to the pool, which is made if there is none. Engines may be running.

    Every page is checked. What the pool has stays; where it gets full, what was used last is back. The exit code is 3
    if pages of the snapshot were damaged; the others are restored.

    \b
    Examples:
      mooncake-connector store restore /var/lib/mooncake-connector/snapshot
      mooncake-connector store restore /mnt/backup/kv --pool /dev/shm/other --json
    """
    started_s = time.monotonic()
    with Snapshot(folder) as snapshot:
        spaces = [name for name in snapshot.spaces if name is not None]
        known = {namespace.digest: namespace.model_name for namespace, _ in spaces}
        digest = pool_.match_namespace(known, namespace, "this snapshot")
        with _opened(pool, snapshot.manifest.capacity_nbytes) as store, _bar("restoring") as progress:
            report = restore(snapshot, store, digest, progress)
            location = str(store.path)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        print_json({"pool": location, **dataclasses.asdict(report), "seconds": elapsed_s})
    else:
        typer.echo(f"restored {report.pages:,} pages to {location}, {_speed(report.nbytes, elapsed_s)}")
        for count, why in (
            (report.present_pages, "were in the pool already"),
            (report.no_room_pages, "found no room, those that were not used for the longest time"),
            (report.damaged_pages, "were damaged, and left out"),
            (report.unknown_pages, "are of a namespace that this version does not know"),
            (report.failed_pages, "could not be stored (`mooncake-connector store stats` has the causes)"),
        ):
            if count:
                typer.echo(f"{count:,} pages {why}")
    if report.damaged_pages:
        raise typer.Exit(EXIT_DAMAGED)


@contextlib.contextmanager
def _opened(pool: Path | None, capacity_nbytes: int) -> Iterator[EmbeddedStore]:
    """The pool that engines would use: the one there is, or a new one, as large as configured or as the saved one."""
    config = load_config()
    path = pool.absolute() if pool is not None else config.pool
    try:
        store = EmbeddedStore(path, config.capacity, eviction=config.eviction, rebuild=False)
    except PoolError as error:
        if isinstance(error.__context__, LockTimeout):
            raise
        try:
            store = EmbeddedStore(path, config.capacity or capacity_nbytes, eviction=config.eviction)
        except PoolError:
            if config.capacity:
                raise
            store = EmbeddedStore(path, eviction=config.eviction)  # this machine has less room than that one
    with store:
        yield store


def _speed(nbytes: int, elapsed_s: float) -> str:
    return f"{human_nbytes(nbytes)} in {elapsed_s:.1f} s ({human_nbytes(int(nbytes / max(elapsed_s, 1e-3)))}/s)"


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress | None]:
    """What reports its progress in bytes: a bar on stderr, or nothing where no person is looking."""
    screen = error_console()
    if not screen.is_terminal:
        yield None
        return
    columns: list[ProgressColumn] = [
        TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn(),
    ]  # fmt: skip
    with rich.progress.Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, nbytes: bar.update(task, completed=done, total=nbytes)
