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
from mooncake_connector.misses import Miss

LOGS_REQUESTS = {"MOONCAKE_CONNECTOR_LOG_REQUESTS": "true"}
"""In a server's environment."""


def told(server: ServerProcess, pool: Path) -> dict[str, list[tuple[str, str]]]:
    """Status and detail of the doctor's checks, by their name."""
    result = CliRunner().invoke(app, ["doctor", "--url", server.url, "--pool", str(pool), "--json"])
    found: dict[str, list[tuple[str, str]]] = {}
    for check in json.loads(result.stdout)["checks"]:
        found.setdefault(check["name"], []).append((check["status"], check["detail"]))
    return found


def glance(server: ServerProcess, pool: Path) -> Any:
    """What `mooncake-connector top --once --json` shows."""
    result = CliRunner().invoke(app, ["top", "--once", "--json", "--url", server.url, "--pool", str(pool)])
    return json.loads(result.stdout)


def top(server: ServerProcess, pool: Path, meanwhile: Callable[[], object], *figures: str) -> list[dict[str, Any]]:
    """What `mooncake-connector top --once` shows of the engine while something is done with it again and again.

    Looks until each of these figures has been there, of one by name one of them: any one look may come between two
    requests.
    """
    shown: list[dict[str, Any]] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            meanwhile()

    def are_there() -> bool:
        shown.extend(glance(server, pool)["engines"])
        return going_on.done() or all(any(_is_there(each[name]) for each in shown) for name in figures)

    with ThreadPoolExecutor(1) as threads:
        going_on = threads.submit(go_on)
        try:
            wait_for(are_there, f"{', '.join(figures)} in `top`")
        finally:
            over.set()
        going_on.result()
    return shown


def _is_there(figure: Any) -> bool:
    return any(figure.values()) if isinstance(figure, dict) else bool(figure)


def why(pool: Path, *arguments: str) -> Any:
    """What `mooncake-connector why --json` says; None where it fails."""
    result = CliRunner().invoke(app, ["why", "--pool", str(pool), "--json", *arguments])
    return json.loads(result.stdout) if result.exit_code == 0 else None


def why_in_words(pool: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["why", "--pool", str(pool), *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def runs(told: Any) -> list[tuple[int, int, str]]:
    """First page, last page and what became of them, of the first group of layers."""
    return [(run["first"], run["last"], run.get("cause", run["what"])) for run in told["groups"][0]["runs"]]


def lines(server: ServerProcess) -> list[dict[str, str]]:
    """The lines of requests in the server's log, each as its keys and values."""
    said = re.findall(r"request (id=\S+ prompt_tokens=.*)$", server.log_text(), re.MULTILINE)
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said]


def line(server: ServerProcess, ask: Callable[[], object]) -> dict[str, str]:
    """The line of the request that `ask` sends."""
    before = len(lines(server))
    ask()
    wait_for(lambda: len(lines(server)) > before, "the request's line in the log")
    return lines(server)[-1]


def explained_in_words(
    server: ServerProcess, pool: Path, said: dict[str, str], *, again: Callable[[], object] = lambda: None
) -> None:
    """`why --request` and the doctor have the reason in the request's line as words, and what to do about it.

    `again` sends more of such requests: the doctor is silent about a small part of what a server was ever asked.
    """
    words = Miss(said["miss"]).words
    asked = why_in_words(pool, "--request", said["id"])
    assert f" tokens {words.said}\n" in asked and f"what to do: {words.do}\n" in asked

    def doctor_says_so() -> bool:
        again()
        missed = [detail for _, detail in told(server, pool).get("missed", ())]
        return any(words.said in detail and detail.endswith(f": {words.do}") for detail in missed)

    wait_for(doctor_says_so, f"{said['miss']} in the doctor's words", every_s=0.5)
