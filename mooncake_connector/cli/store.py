"""`mooncake-connector store`: look into the pool of KV pages, check it, empty it."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import rich.progress
import typer
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli import tables
from mooncake_connector.cli.columns import clean
from mooncake_connector.cli.output import (
    EXIT_DAMAGED,
    Json,
    PoolFolder,
    command_group,
    error_console,
    print_json,
    print_table,
    width,
)
from mooncake_connector.errors import PoolError
from mooncake_connector.sizes import human_nbytes
from store_client import Store
from store_client.agent.forget import mark
from store_client.agent.visit import ask_report, ask_to_forget
from store_client.base import Progress
from store_client.embedded import PoolUser, pool_users
from store_client.embedded.policies import POLICIES

app = command_group("Inspect, verify, clear, save, restore and delete the pool of KV pages.")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Which = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        metavar="ID",
        help="Only this namespace: the first digits of an id that `store ls` prints.",
        show_default=False,
    ),
]


@app.command()
def stats(pool: PoolFolder = None, as_json: Json = False) -> None:
    """Size, hits, evictions and failures of the pool, what each model holds of it, and which processes use it.

    Where an agent runs, also how each tier does.
    Counters are summed over all processes since the pool was created.

    \b
    Examples:
      mooncake-connector store stats
      mooncake-connector store stats --json | jq '.hit_tokens / (.hit_tokens + .missed_tokens)'
    """
    with pool_.opened(pool) as store:
        state, spaces = store.stats(), store.namespaces()
    users = pool_users(Path(state.location))
    report = _agent_of(Path(state.location))
    if as_json:
        named = {"namespaces": tables.namespaces_json(spaces), "users": tables.users_json(users)}
        print_json({**tables.plain(state), **named, "agent": report})
        return
    print_table(tables.stats_lines(state, width()))
    if spaces:
        typer.echo()
        print_table(tables.namespaces_lines(spaces, width()))
    if report is not None:
        typer.echo()
        print_table(tables.tiers_lines(report, width()))
    typer.echo()
    print_table(tables.users_lines(users, width()))


def _agent_of(folder: Path) -> dict[str, Any] | None:
    """The report of the pool's agent, if there is one that answers."""
    try:
        return ask_report(folder)
    except PoolError as error:
        typer.echo(clean(f"{error}"), err=True)
        return None


@app.command()
def eviction(
    policy: Annotated[
        str | None, typer.Argument(metavar="|".join(POLICIES), help="The policy from now on; without one it is shown.")
    ] = None,
    pool: PoolFolder = None,
    as_json: Json = False,
) -> None:
    """Show or change which pages the pool evicts first. A change goes for all its processes, at once; pages stay.

    lru: what was least recently used. s3-fifo: what was used once. auto: what comes back last, by the pool's own record
    of uses. `mooncake-connector simulate` compares them on recorded traffic.

    \b
    Examples:
      mooncake-connector store eviction
      mooncake-connector store eviction s3-fifo
    """
    with pool_.opened(pool) as store:
        if policy is not None:
            store.choose_eviction(policy)
        found = store.eviction
    if as_json:
        print_json({"eviction": found})
    else:
        typer.echo(found)


@app.command("ls")
def list_(pool: PoolFolder = None, as_json: Json = False) -> None:
    """List what the pool holds, by model and by the part of a page (layers, KV heads) that one rank stores.

    \b
    Examples:
      mooncake-connector store ls
      mooncake-connector store ls --pool /mnt/kv --json
    """
    with pool_.opened(pool) as store:
        spaces = store.namespaces()
    if as_json:
        print_json(tables.spaces_json(spaces))
    elif spaces:
        print_table(tables.spaces_lines(spaces, width()))
    else:
        typer.echo("the pool is empty")


@app.command()
def clear(
    pool: PoolFolder = None,
    namespace: Which = None,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="In the tiers behind the pool as well, for all hosts that share them.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove all pages, or those of one namespace. Engines keep running and recompute what they need.

    Pages that a tier has as well come back from it when they are asked for, except with --tiers: the agent then has
    the tiers forget them, at once or, where none runs now, when it is started, before it fetches anything. The mark
    that tells it so is lost when the machine is restarted or the pool is deleted before: `store purge` needs no agent.

    \b
    Examples:
      mooncake-connector store clear
      mooncake-connector store clear --tiers
      mooncake-connector store clear --namespace 3f9a1c --yes
    """
    with pool_.opened(pool) as store:
        digest = pool_.find_namespace(store, namespace)
        users = _name_users(pool_.locate(pool))
        confirm(_clear_question(store, digest, tiers), yes)
        if tiers:
            _have_tiers_forget(store.path, digest)
        pages = store.clear(digest)
        # Once more, since a tier may have been given pages of the pool meanwhile.
        if tiers and not _have_tiers_forget(store.path, digest):
            which = "" if digest is None else f" --namespace {digest.hex()}"
            typer.echo(
                "no agent runs now: the tiers forget the pages when it is started, unless the machine is restarted or "
                f"the pool is deleted before; `mooncake-connector store purge{which}` does it now",
                err=True,
            )
    if as_json:
        print_json({"cleared_pages": pages, "users": tables.users_json(users)})
    else:
        typer.echo(f"removed {pages:,} pages")


@app.command()
def verify(pool: PoolFolder = None, as_json: Json = False) -> None:
    """Check every page against its checksum. Corrupt pages are removed; the exit code is then 3.

    \b
    Examples:
      mooncake-connector store verify
      mooncake-connector store verify --json
    """
    with pool_.opened(pool) as store, _progress_bar("verifying") as progress:
        report = store.verify(progress)
    if as_json:
        print_json(dataclasses.asdict(report))
    elif report.corrupt:
        typer.echo(f"{report.corrupt:,} of {report.pages:,} pages were corrupt and have been removed")
    else:
        typer.echo(f"all {report.pages:,} pages ({human_nbytes(report.nbytes)}) are intact")
    if report.corrupt:
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def destroy(pool: PoolFolder = None, yes: Yes = False, as_json: Json = False) -> None:
    """Delete the pool folder and give its memory back.

    Refuses a folder that is not a pool. Stop the engines first: an engine that is still running makes a new pool.

    \b
    Examples:
      mooncake-connector store destroy
      mooncake-connector store destroy --pool /dev/shm/mooncake-connector-1000 --yes
    """
    folder = pool_.locate(pool)
    users = _name_users(folder)
    confirm(f"Delete the pool {folder} ({human_nbytes(pool_.folder_nbytes(folder))})?", yes)
    freed = pool_.destroy(folder)
    if as_json:
        print_json({"pool": str(folder), "freed_nbytes": freed, "users": tables.users_json(users)})
    else:
        typer.echo(f"deleted {folder}, {human_nbytes(freed)} freed")


def _name_users(folder: Path) -> list[PoolUser] | None:
    """Say on stderr which processes have the pool open, if any."""
    users = pool_users(folder)
    if users is None or users:
        for line in tables.users_lines(users, width()):
            typer.echo(line, err=True)
    return users


def confirm(question: str, yes: bool) -> None:
    """Ask on stderr, so that stdout holds the result alone; anything but a yes ends the command."""
    if yes:
        return
    typer.echo(f"{clean(question)} [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise PoolError("nothing was done; answer y, or use --yes")


def _have_tiers_forget(pool: Path, digest: bytes | None) -> bool:
    """Whether an agent runs that does it now."""
    try:
        mark(pool, digest)
    except OSError as error:
        raise PoolError(
            f"pool {pool}: no mark can be left for its agent, so tiers may keep the pages: {error}; make room there "
            "and try again, or use `mooncake-connector store purge`"
        ) from None
    return ask_to_forget(pool)


def _clear_question(store: Store, digest: bytes | None, tiers: bool) -> str:
    spaces = [space for space in store.namespaces() if digest in (None, space.namespace.digest)]
    pages, nbytes = sum(space.pages for space in spaces), sum(space.nbytes for space in spaces)
    models = ", ".join(sorted({space.namespace.model_name for space in spaces})) or "no model"
    where = store.stats().location + (", and what the tiers behind it have of them" if tiers else "")
    return f"Remove {pages:,} pages ({human_nbytes(nbytes)}) of {models} in {where}?"


@contextlib.contextmanager
def _progress_bar(what: str) -> Iterator[Progress | None]:
    """What a store reports its progress to: a bar on stderr, or nothing where no person is looking."""
    screen = error_console()
    if not screen.is_terminal:
        yield None
        return
    columns: list[ProgressColumn] = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with rich.progress.Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, pages: bar.update(task, completed=done, total=pages)
