"""What `mooncake-connector up` shows while it runs: what happens, a line each, and on a terminal a table below."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mooncake_connector.cli.output import human_seconds, human_share
from mooncake_connector.deploy.commands import Command
from mooncake_connector.deploy.supervisor import Process, State
from mooncake_connector.deploy.watch import read
from mooncake_connector.log import printable
from mooncake_connector.sizes import human_nbytes

_REFRESH_S = 1.0
_STYLES = {State.READY: "green", State.STARTING: "cyan", State.WAITING: "dim", State.STOPPED: "dim"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich's own ends the program."""
        _silence()


@contextlib.contextmanager
def _or_silent() -> Iterator[None]:
    """A deployment goes on, and is stopped to the end, also where its words cannot be written any more."""
    try:
        yield
    except OSError:
        _silence()


def _silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class Board:
    """Lines on stdout; a table below them that stays live where stdout is a terminal."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._console = _Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if sys.stdout.isatty() else None
        self._shown_s = 0.0

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            with _or_silent():
                self._live.stop()

    def say(self, text: str) -> None:
        """Each line at once, also into a pipe."""
        with _or_silent():
            for line in text.splitlines():
                self._console.print(Text(printable(line)), soft_wrap=True)
            sys.stdout.flush()

    def show(self, processes: Sequence[Process]) -> None:
        now = time.monotonic()
        if self._live is not None and now - self._shown_s >= _REFRESH_S:
            self._shown_s = now
            with _or_silent():
                self._live.update(table(processes), refresh=True)


def table(processes: Sequence[Process]) -> Table:
    found = Table(box=None, pad_edge=False)
    for heading in ("", "state", "for", "requests", "waiting", "done", "hit rate", "KV moved"):
        found.add_column(heading, justify="left" if heading in ("", "state") else "right")
    for process in processes:
        figures = process.figures
        values = [""] * 5 if figures is None else [
            f"{figures.running:,}",
            f"{figures.waiting:,}",
            f"{figures.done:,}",
            human_share(figures.hit_tokens, figures.prompt_tokens),
            human_nbytes(figures.moved_nbytes),
        ]  # fmt: skip
        state = Text(process.state.value, style=_STYLES.get(process.state, "red"))
        found.add_row(process.name, state, human_seconds(time.monotonic() - process.since_s), *values)
    return found


def welcome(run: Sequence[Command]) -> str:
    """Where it answers, and a command to try that with."""
    router = next((one for one in run if one.role == "router"), None)
    decode = next(one for one in run if one.role == "decode")
    if router is None:
        places = ", ".join(
            f"{one.name} {one.url}" + (f" (port {one.peer_port})" if one.peer_port else "") for one in run
        )
        return f"ready, for a router of yours: {places}"
    body = json.dumps({"model": model_of(decode.url), "prompt": "The capital of France is", "max_tokens": 16})
    quoted = body.replace("'", "'\\''")
    return (
        f"\nready at {router.url}, until Ctrl-C; try\n\n"
        f"  curl {router.url}/v1/completions -H 'Content-Type: application/json' \\\n    -d '{quoted}'\n"
    )


def model_of(url: str) -> str:
    """The name under which an instance serves its model."""
    try:
        return str(json.loads(read(f"{url}/v1/models") or "")["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        return "MODEL"
