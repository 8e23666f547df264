"""A real Prometheus with the configuration and the rules that are shipped."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_connector.dashboards import export

__all__ = ["Prometheus", "needs_prometheus", "prometheus", "promtool"]

READY_S = 120.0
STOP_S = 60.0
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus") or not shutil.which("promtool"),
    reason="NOT TESTED: needs prometheus and promtool (tests/requirements/system.txt)",
)


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)


class Prometheus:
    """Asks one that runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, expr: str) -> list[dict[str, Any]]:
        return list(self._get("query", query=expr)["result"])

    def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        found = self._get("query_range", query=expr, start=str(start), end=str(end), step=str(step_s))
        return list(found["result"])

    def targets(self) -> list[dict[str, Any]]:
        return list(self._get("targets")["activeTargets"])

    def firing(self) -> set[str]:
        """Names of alerts."""
        return {one["labels"]["alertname"] for one in self._get("alerts")["alerts"] if one["state"] == "firing"}

    def is_ready(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=10) as answer:
            return answer.status == 200
        return False

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{what}?{query}", timeout=60) as answer:
            return dict(json.load(answer)["data"])


@contextmanager
def prometheus(folder: Path, port: int, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """Runs with what `dashboards export` wrote into the folder, and scrapes `targets` by job, every second.

    Alerts do not wait until what they report has lasted.
    """
    export(folder)
    rules = yaml.safe_load((folder / "alerts.yml").read_text("utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
    (folder / "alerts.yml").write_text(yaml.safe_dump(rules), "utf-8")
    configuration = yaml.safe_load((folder / "prometheus.yml").read_text("utf-8"))
    configuration["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    for job in configuration["scrape_configs"]:
        job["static_configs"] = [{"targets": list(targets[job["job_name"]])}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), "utf-8")
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    try:
        running, give_up_s = Prometheus(port), time.monotonic() + READY_S
        while not running.is_ready():
            assert process.poll() is None, (folder / "prometheus.log").read_text()[-4000:]
            assert time.monotonic() < give_up_s, "Prometheus is not ready"
            time.sleep(0.1)
        yield running
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
        process.wait()
