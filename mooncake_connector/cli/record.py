"""`mooncake-connector record`: a pool's traffic as a trace for `simulate`."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli.columns import clean
from mooncake_connector.cli.output import Json, PoolFolder, human_seconds, print_json, typed_path
from mooncake_connector.cli.store import Which
from mooncake_connector.errors import MooncakeConnectorError, PoolError
from store_client import EmbeddedStore
from store_client.base import SpaceInfo
from store_client.embedded.names import identify
from store_client.embedded.table import now_ns
from store_client.embedded.watching import Watch
from store_client.simulation.recording import Recording

_LOOK_PERIOD_S = 0.2
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _typed_seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text)
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text!r}: expected a time such as 90s, 30m, 24h or 7d", param_hint="--for")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=typed_path, help="The recording, a new file.")],
    duration: Annotated[str, typer.Option("--for", metavar="TIME", help="How long: 90s, 30m, 24h, 7d.")] = "1h",
    requests: Annotated[int, typer.Option(min=1, max=10_000_000, help="At most so many requests.")] = 100_000,
    pool: PoolFolder = None,
    namespace: Which = None,
    as_json: Json = False,
) -> None:
    """Record which pages of the pool are used when, for `simulate`: no text, no tokens, no names of pages.

    Looks at the pool five times a second; engines notice nothing, and nothing is recorded but by this command. Of a
    model whose ranks store parts of pages, one rank's are recorded. Ctrl-C ends it well and keeps what there is: before
    the pool's first page that is no file.

    \b
    Examples:
      mooncake-connector record trace.jsonl --for 24h
      mooncake-connector record trace.jsonl --namespace 3f9a1c
    """
    lasts_s = _typed_seconds(duration)
    if file.exists():
        raise PoolError(f"{file} exists: name a new file, or delete it")
    with pool_.opened(pool) as store:
        ends_s = time.monotonic() + lasts_s
        if not store.namespaces():
            file.touch(exist_ok=False)  # what cannot be written is said now, not when the first page comes
            file.unlink()
        space = _choose(store, namespace, ends_s)
        if space is None:
            _say(None, 0, as_json)
            return
        watch = Watch(identify((space.namespace.digest, space.shard)))
        store.used_chains(watch)
        recording = Recording(file, space.namespace.page_tokens, requests)
        try:
            _follow(store, space, watch, recording, ends_s)
        except OSError as error:
            raise MooncakeConnectorError(
                f"{file}: {error.strerror or error}; the {recording.requests:,} requests until then are in it, and "
                "`simulate` reads them"
            ) from None
    _say(file, recording.requests, as_json)


def _say_what(space: SpaceInfo, ends_s: float) -> None:
    name = space.namespace
    typer.echo(f"recording {name.digest.hex()[:8]} ({clean(name.model_name)})", err=True)
    lasts = human_seconds(max(0.0, ends_s - time.monotonic()))
    typer.echo(f"for {lasts}; Ctrl-C ends it and keeps what there is", err=True)


def _say(file: Path | None, requests: int, as_json: bool) -> None:
    if as_json:
        print_json({"file": None if file is None else str(file), "requests": requests})
    else:
        typer.echo(f"{requests:,} requests in {file}" if file is not None else "nothing was recorded: there is no file")


def _follow(store: EmbeddedStore, space: SpaceInfo, watch: Watch, recording: Recording, ends_s: float) -> None:
    """Record until the end, or Ctrl-C. Raises OSError where the file cannot be written."""
    try:
        if sys.stderr.isatty():
            _say_what(space, ends_s)
        while time.monotonic() < ends_s and not recording.is_full:
            time.sleep(min(_LOOK_PERIOD_S, max(0.0, ends_s - time.monotonic())))
            recording.add(store.used_chains(watch), now_ns())
    except KeyboardInterrupt:
        pass
    finally:
        recording.close()


def _choose(store: EmbeddedStore, beginning: str | None, ends_s: float) -> SpaceInfo | None:
    """The space with the most pages, of this namespace where one is given; the first that there is, None at Ctrl-C."""
    digest, told = pool_.find_namespace(store, beginning), False
    while True:
        spaces = [each for each in store.namespaces() if digest in (None, each.namespace.digest)]
        spaces = [each for each in spaces if not each.namespace.rests_on_others]
        if spaces:
            return max(spaces, key=lambda each: each.pages)
        if time.monotonic() >= ends_s:
            raise PoolError("nothing was recorded: no engine has stored a page in the pool in that time")
        if not told:
            typer.echo("the pool has no pages yet: the recording begins after the first of them", err=True)
            told = True
        try:
            time.sleep(_LOOK_PERIOD_S)
        except KeyboardInterrupt:
            return None
