"""Engines as on hosts of their own: each has a pool and an agent, and tiers are all that they share."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from e2e.pages import wait_for
from e2e.process import ENVIRONMENTS, small_environment
from mooncake_connector.errors import PoolError
from store_client.agent.visit import ask_report

__all__ = ["CAPACITY", "ENGINE", "Agent", "Cluster", "silent_master"]

COMMAND = ENVIRONMENTS.parent / ".venv" / "bin" / "mooncake-connector"
"""Of the environment that has Mooncake; those of the engines do not, as on a host where only the agent needs it."""
CAPACITY = "256MiB"
ENGINE = {
    "MOONCAKE_CONNECTOR_TIERS": "mooncake",
    "MOONCAKE_CONNECTOR_AGENT": "external",
    "MOONCAKE_CONNECTOR_CAPACITY": CAPACITY,
}
"""Settings of an engine whose agent is started apart: what its tiers are is the agent's business."""
PATIENCE_S = 120.0


class Command:
    """`mooncake-connector ...` as a process of its own, and what it says."""

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**small_environment(), **(env or {})},
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )

    def check_alive(self) -> None:
        status = self.process.poll()
        assert status is None, f"{self.process.args} ended with {status}\n{self.log.read_text()[-4000:]}"

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ends it and whatever it left."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


class Agent:
    """The agent of one pool, started again by the test, as systemd would."""

    def __init__(self, pool: Path, log: Path, env: Mapping[str, str]) -> None:
        self.pool, self._log, self._env = pool, log, dict(env)
        self._command: Command | None = None
        log.unlink(missing_ok=True)

    def start(self, *tiers: dict[str, Any]) -> None:
        """With these tiers from now on; without any, with those of before."""
        if tiers:
            self._env["MOONCAKE_CONNECTOR_TIERS"] = json.dumps(tiers)
        self._command = Command(self._log, "agent", "--foreground", "--pool", str(self.pool), env=self._env)
        wait_for(self._answers, f"an agent of {self.pool}")

    def _answers(self) -> bool:
        assert self._command is not None
        self._command.check_alive()
        with suppress(PoolError):
            return ask_report(self.pool) is not None
        return False

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def restart(self, *tiers: dict[str, Any]) -> None:
        self.stop()
        self.start(*tiers)

    def _end(self, number: int) -> None:
        command, self._command = self._command, None
        if command is not None:
            command.end(number)

    def count(self, name: str) -> int:
        """The sum over all tiers of a figure that the agent reports."""
        report = ask_report(self.pool)
        return 0 if report is None else sum(tier[name] for tier in report["tiers"])


class Cluster:
    """A Mooncake master and two nodes; what is killed of it is started again, three times each."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        logs.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        log = self._logs / "up.log"
        log.unlink(missing_ok=True)
        self._command = Command(log, "cluster", "up", "--nodes", "2", "--memory", "2GiB", "--logs", str(self._logs))
        try:
            wait_for(self._is_ready, "a Mooncake cluster")
        except BaseException:
            self._command.end()
            raise

    def _is_ready(self) -> bool:
        self._command.check_alive()
        return "The cluster is ready" in self._command.log.read_text()

    @property
    def tier(self) -> dict[str, Any]:
        (address,) = set(re.findall(r'"master": "([^"]+)"', self._command.log.read_text()))
        return {"kind": "mooncake", "master": address, "host": "127.0.0.1"}

    def kill(self, what: str) -> None:
        """SIGKILL to the `master`, or to the first `client` that is a node."""
        for process in psutil.Process(self._command.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if Path(process.exe()).name == f"mooncake_{what}":
                    process.kill()
                    return
        raise AssertionError(f"no mooncake_{what} runs")

    def stop(self) -> None:
        self._command.end()


@contextmanager
def silent_master() -> Iterator[dict[str, Any]]:
    """A tier whose master accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def accept() -> None:
            with suppress(OSError):
                while True:
                    held.append(listener.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield {"kind": "mooncake", "master": f"127.0.0.1:{listener.getsockname()[1]}", "host": "127.0.0.1"}
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for one in held:
                one.close()


