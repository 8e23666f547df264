"""What people are told of a running server: by `mooncake-connector doctor --url`, and by its log, a line a request."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

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


def lines(server: ServerProcess) -> list[dict[str, str]]:
    """The lines of requests in the server's log, each as its keys and values."""
    said = re.findall(r"request (id=\S+ prompt_tokens=.*)$", server.log_text(), re.MULTILINE)
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in said]
