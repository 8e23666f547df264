"""Engines as on hosts of their own: each has a pool and an agent, and tiers are all that they share."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from e2e.network import LOOPBACK, Host
from e2e.pages import wait_for
from e2e.process import ENVIRONMENTS, free_port, small_environment
from mooncake_connector.errors import PoolError
from store_client.agent.visit import ask_report

__all__ = ["CAPACITY", "ENGINE", "Agent", "Cluster"]

COMMAND = ENVIRONMENTS.parent / ".venv" / "bin" / "mooncake-connector"
"""Of the environment that has Mooncake; those of the engines do not, as on a host where only the agent needs it."""
CAPACITY = "256MiB"
ENGINE = {
    "MOONCAKE_CONNECTOR_TIERS": "mooncake",
    "MOONCAKE_CONNECTOR_AGENT": "external",
    "MOONCAKE_CONNECTOR_CAPACITY": CAPACITY,
}
"""Settings of an engine whose agent is started apart: what its tiers are is the agent's business."""
DOCS = ENVIRONMENTS.parent / "docs" / "fleet.md"
MASTER, NODE = "10.0.0.1", "10.0.0.7"
"""Addresses in its commands for real hosts."""
MASTER_PORT, METRICS_PORT = 50051, 9003


class Command:
    """A process of its own, and what it says. `launcher` runs the rest of its arguments on another host."""

    def __init__(
        self, log: Path, *command: str | Path, env: Mapping[str, str] | None = None, launcher: Sequence[str] = ()
    ) -> None:
        self.log = log
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [*launcher, *command],
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
    """The agent of one pool, on the pool's host; started again by the test, as systemd would."""

    def __init__(self, pool: Path, log: Path, env: Mapping[str, str], host: Host = LOOPBACK) -> None:
        self.pool, self._log, self._env, self._host = pool, log, dict(env), host
        self._command: Command | None = None
        log.unlink(missing_ok=True)

    def start(self, *tiers: dict[str, Any]) -> None:
        """With these tiers from now on; without any, with those of before."""
        if tiers:
            self._env["MOONCAKE_CONNECTOR_TIERS"] = json.dumps(tiers)
        arguments = ("agent", "--foreground", "--pool", self.pool)
        self._command = Command(self._log, COMMAND, *arguments, env=self._env, launcher=self._host.launcher)
        wait_for(self._answers, f"an agent of {self.pool}")

    def _answers(self) -> bool:
        assert self._command is not None
        self._command.check_alive()
        with suppress(PoolError):
            return ask_report(self.pool) is not None
        return False

    @property
    def is_running(self) -> bool:
        return self._command is not None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Its connections stay, and it says nothing, meanwhile."""
        agent = psutil.Process(self.pid)
        agent.suspend()
        try:
            yield
        finally:
            agent.resume()

    def restart(self, *tiers: dict[str, Any]) -> None:
        self.stop()
        self.start(*tiers)

    def _end(self, number: int) -> None:
        command, self._command = self._command, None
        if command is not None:
            command.end(number)

    @property
    def pid(self) -> int:
        """Of the agent itself, whatever launched it."""
        report = ask_report(self.pool)
        assert report is not None
        return int(report["pid"])

    def count(self, name: str) -> int:
        """The sum over all tiers of a figure that the agent reports."""
        report = ask_report(self.pool)
        return 0 if report is None else sum(tier[name] for tier in report["tiers"])


class Cluster:
    """A Mooncake master and nodes, each on its host, by the very commands that docs/fleet.md gives for real hosts.

    The test starts again what it killed, as systemd would. Without namespaces all share one address.
    """

    def __init__(self, master: Host, nodes: Sequence[Host], logs: Path) -> None:
        self._logs = logs
        logs.mkdir(exist_ok=True)
        self._master, self._nodes = master, nodes
        apart = bool(master.name)
        port, metrics_port = (MASTER_PORT, METRICS_PORT) if apart else (free_port(), free_port())
        self._address = f"{master.data}:{port}"
        self._segments = f"http://{master.control}:{metrics_port}/get_all_segments"
        said, _ = said_for_real_hosts(self._address, "")
        self._commands = {"master": (master, [*said, f"--metrics_port={metrics_port}"])}
        for number, node in enumerate(nodes):
            _, said = said_for_real_hosts(self._address, node.data)
            port_of_its_own = [] if apart else [f"--port={free_port()}"]
            self._commands[f"node-{number}"] = (node, [*said, *port_of_its_own])
        self._running: dict[str, Command] = {}
        for name in self._commands:
            (logs / f"{name}.log").unlink(missing_ok=True)

    def start(self) -> None:
        """Whatever does not run; ready when the master knows all nodes."""
        for name, (host, (program, *arguments)) in self._commands.items():
            if name not in self._running:
                path = COMMAND.with_name(program)
                log = self._logs / f"{name}.log"
                self._running[name] = Command(log, path, *arguments, env={"MC_FORCE_TCP": "1"}, launcher=host.launcher)
            if name == "master":
                wait_for(lambda: self._known_segments() is not None, "a Mooncake master")
        try:
            wait_for(lambda: len(self._known_segments() or ()) == len(self._nodes), "all nodes of a Mooncake cluster")
        except AssertionError as error:
            raise AssertionError(f"{error}: its master knows {self._known_segments()}") from None

    def _known_segments(self) -> list[bytes] | None:
        """What the master says that nodes have mounted; None where it does not answer."""
        for command in self._running.values():
            command.check_alive()
        with suppress(OSError), urllib.request.urlopen(self._segments, timeout=10) as answer:
            return answer.read().split()
        return None

    @property
    def tier(self) -> dict[str, Any]:
        """What an agent is told; which address of its host is the one for others it finds out by itself."""
        return {"kind": "mooncake", "master": self._address}

    def kill(self, name: str) -> None:
        """SIGKILL to the `master`, or to `node-0` and so on."""
        self._running.pop(name).end(signal.SIGKILL)

    @contextmanager
    def silent_master(self) -> Iterator[None]:
        """The master accepts connections and never says a word, meanwhile."""
        process = self._running["master"].process
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        while self._running:
            self._running.popitem()[1].end()


def said_for_real_hosts(master: str, node: str) -> tuple[list[str], list[str]]:
    """The commands for a master and for a node, with these addresses, over TCP, and the memory that a test has."""
    (block,) = re.findall(
        r"^\*\*On real hosts\.\*\*.*?\n\n((?:    [^\n]*\n)+)", DOCS.read_text(), re.DOTALL | re.MULTILINE
    )
    host, _, port = master.partition(":")
    for written, meant in {
        f"--rpc_address={MASTER}": f"--rpc_address={host}",
        f"--rpc_port={MASTER_PORT}": f"--rpc_port={port}",
        f"--master_server_address={MASTER}:{MASTER_PORT}": f"--master_server_address={master}",
        f"--host={NODE}": f"--host={node}",
        "--global_segment_size=256GB": "--global_segment_size=1GB",
        "--protocol=rdma --device_names=mlx5_0": "--protocol=tcp",
    }.items():
        assert written in block, f"{DOCS} does not say {written}"
        block = block.replace(written, meant)
    master_command, node_command = block.replace("\\\n", " ").strip().splitlines()
    return shlex.split(master_command), shlex.split(node_command)
