"""What people are told of a running server: by `mooncake-connector doctor --url`, `top` and `why`, and by its log."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from e2e.pages import wait_for
from e2e.process import ServerProcess
from mooncake_connector.cli.main import app

LOGS_REQUESTS = {"MOONCAKE_CONNECTOR_LOG_REQUESTS": "true"}
"""In a server's environment."""


def told(server: ServerProcess, pool: Path) -> dict[str, list[tuple[str, str]]]:
    """Status and detail of the doctor's checks, by their name."""
    result = CliRunner().invoke(app, ["doctor", "--url", server.url, "--pool", str(pool), "--json"])
    found: dict[str, list[tuple[str, str]]] = {}
    for check in json.loads(result.stdout)["checks"]:
        found.setdefault(check["name"], []).append((check["status"], check["detail"]))
    return found


def top(server: ServerProcess, pool: Path, meanwhile: Callable[[], object], *figures: str) -> list[dict[str, Any]]:
    """What `mooncake-connector top --once` shows of the engine while something is done with it again and again.

    Looks until each of these figures has been there: any one look may come between two requests.
    """
    shown: list[dict[str, Any]] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            meanwhile()

    def are_there() -> bool:
        result = CliRunner().invoke(app, ["top", "--once", "--json", "--url", server.url, "--pool", str(pool)])
        shown.extend(json.loads(result.stdout)["engines"])
        return going_on.done() or all(any(each[name] for each in shown) for name in figures)

    with ThreadPoolExecutor(1) as threads:
        going_on = threads.submit(go_on)
        try:
            wait_for(are_there, f"{', '.join(figures)} in `top`")
        finally:
            over.set()
        going_on.result()
    return shown


def why(pool: Path, *arguments: str) -> Any:
    """What `mooncake-connector why --json` says; None where it fails."""
    result = CliRunner().invoke(app, ["why", "--pool", str(pool), "--json", *arguments])
    return json.loads(result.stdout) if result.exit_code == 0 else None


def runs(told: Any) -> list[tuple[int, int, str]]:
    """First page, last page and what became of them, of the first group of layers."""
    return [(run["first"], run["last"], run.get("cause", run["what"])) for run in told["groups"][0]["runs"]]


def lines(server: ServerProcess) -> list[dict[str, str]]:
    """The lines of requests in the server's log, each as its keys and values."""
    said = re.findall(r"request (id=\S+ prompt_tokens=.*)$", server.log_text(), re.MULTILINE)
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said]
