"""`mooncake-connector top`: the pool and the engines on it, live."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli.live import NoFigures, base_of
from mooncake_connector.cli.output import EXIT_FAILED, Json, PoolFolder, print_error, print_json
from mooncake_connector.cli.top.figures import Figures
from mooncake_connector.cli.top.screen import Screen, draws_bars
from mooncake_connector.cli.top.sources import Sources
from mooncake_connector.errors import PoolError

_TICK_S = 0.1
_FIRST_ANSWERS_S = 15.0
_PLAIN_WIDTH = 100
_LEAST_S, _MOST_S = 0.2, 3600.0


def top(
    pool: PoolFolder = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            "--url", "-u", metavar="URL", show_default=False,
            help="An engine, as http://HOST:PORT: its /metrics are shown as well. May be given several times.",
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="SECONDS", min=_LEAST_S, max=_MOST_S, help="Between two looks.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show the figures of one interval, and end.")] = False,
    as_json: Json = False,
) -> None:
    """Hit rate, traffic, fill, evictions, processes and tiers of the pool, live. Ctrl-C ends it.

    It reads the pool's own files, takes no lock that an engine waits for, and needs no server. Engines given with --url
    are asked for their metrics: requests, seconds of prefill saved, transfers by transport.
    Where stdout is no terminal there is a line for each interval. `--once` ends with exit code 1 where the pool cannot
    be read, or none of the engines says anything.

    \b
    Examples:
      mooncake-connector top
      mooncake-connector top --url http://localhost:8000 --url http://localhost:8001
      mooncake-connector top --once --json | jq .hit_share
    """
    if as_json and not once:
        raise typer.BadParameter("it goes with --once", param_hint="--json")
    urls = list(dict.fromkeys(map(_checked, url or [])))
    folder: Path | None = None
    no_pool = ""
    try:
        folder = pool_.locate(pool)
    except PoolError as error:
        if pool is not None or not urls:
            raise
        no_pool = str(error)  # engines may be on other hosts, so it is said and no failure
    sources = Sources(folder, urls, interval, no_pool)
    try:
        if once:
            _show_once(sources, as_json)
        else:
            _show_live(sources, interval)
    finally:
        sources.close()


def _checked(url: str) -> str:
    try:
        return base_of(url)
    except NoFigures as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None


def _show_once(sources: Sources, as_json: bool) -> None:
    figures = Figures(sources)
    give_up_s = time.monotonic() + _FIRST_ANSWERS_S
    while not sources.have_answered(1) and time.monotonic() < give_up_s:
        time.sleep(_TICK_S)
    figures.now()
    while not sources.have_answered(2) and time.monotonic() < give_up_s + sources.every_s:
        time.sleep(_TICK_S)
    shown = figures.now()
    if shown.pool is not None and shown.stats is None:
        raise PoolError(shown.cause or f"pool {shown.pool} was not read in time")
    if as_json:
        print_json(shown.to_dict())
    else:
        console = _console()
        for line in _screen(console).lines(shown):
            console.print(line, soft_wrap=True)
    if shown.engines and all(one.cause for one in shown.engines):
        for one in shown.engines:
            print_error(f"{one.url}: {one.cause}")
        raise typer.Exit(EXIT_FAILED)


def _show_live(sources: Sources, interval_s: float) -> None:
    console = _console()
    figures = Figures(sources)
    with _asked_to_end() as asked:
        if console.is_terminal and not console.is_dumb_terminal:
            _redraw(console, figures, interval_s, asked)
        else:
            _print_lines(figures, sources, interval_s, asked)


def _redraw(console: Console, figures: Figures, interval_s: float, asked: list[int]) -> None:
    """Until asked to end. The former screen comes back, however this ends."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        next_s, size = 0.0, console.size
        while not _ends(asked):
            if time.monotonic() >= next_s or console.size != size:
                size = console.size
                lines = _screen(console).lines(figures.now())
                live.update(Group(*lines[: size.height]), refresh=True)
                next_s = time.monotonic() + min(interval_s, 1.0)
            if signal.SIGTSTP in asked:
                live.stop()
                _stand_still()
                live.start()
                asked.clear()
                next_s = 0.0
            time.sleep(_TICK_S)


def _print_lines(figures: Figures, sources: Sources, interval_s: float, asked: list[int]) -> None:
    seen = 0
    while not _ends(asked):
        number = sum(one.number for one in sources.changing)
        if number != seen and sources.have_answered(2):
            seen = number
            typer.echo(Screen(_PLAIN_WIDTH).line(figures.now()))
            sys.stdout.flush()
        else:
            figures.now()
        time.sleep(min(_TICK_S, interval_s))


def _screen(console: Console) -> Screen:
    width = console.width if console.is_terminal else _PLAIN_WIDTH
    return Screen(width, bars=draws_bars(console.encoding))


def _console() -> Console:
    return Console(highlight=False, emoji=False, markup=False)


def _ends(asked: list[int]) -> bool:
    return any(number != signal.SIGTSTP for number in asked)


@contextmanager
def _asked_to_end() -> Iterator[list[int]]:
    """The signals that came, of those that end a command; no handler does more than note it."""
    asked: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP]
    former = {
        number: signal.signal(number, lambda one, frame: asked.append(one))
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield asked
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _stand_still() -> None:
    """Ctrl-Z: stop as any other command, and go on with `fg`."""
    ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, ours)
