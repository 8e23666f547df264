"""A real Mooncake cluster for tests: a master and nodes as processes, to stop, kill and start again."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import pytest

from mooncake_connector.config.tiers import MooncakeTier
from mooncake_connector.deploy.commands import Command
from mooncake_connector.deploy.watch import read
from store_client.tiers.base import TierError
from store_client.tiers.mooncake import MooncakeCluster
from store_client.tiers.mooncake.cluster import free_ports, master_command, node_command

PATIENCE_S = 120.0
SHORT_LEASES = "--default_kv_lease_ttl=500"
LEAVES_OUT = (SHORT_LEASES, "--client_ttl=15")
"""A node that is not heard of for so many seconds is left out; shorter, and a busy machine loses good ones."""


def needs_mooncake() -> None:
    """Skip the test, or the whole module, where Mooncake's client is missing or a library that it needs."""
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        pytest.skip(
            f"NOT TESTED: needs Mooncake's wheel and the libraries in tests/requirements/system.txt ({error})",
            allow_module_level=True,
        )


def until(check: Callable[[], Any], what: str) -> Any:
    """The first answer that is true, within the patience that a busy machine needs."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := check()):
        assert time.monotonic() < end_s, f"{what}: not within {PATIENCE_S:g} s"
        time.sleep(0.05)
    return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Process:
    """One process of the cluster, through all its lives."""

    def __init__(self, command: Command) -> None:
        self.command, self._popen = command, None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process

    def start(self, *, wait: bool = True) -> None:
        self._popen = subprocess.Popen(
            self.command.arguments, env={**os.environ, **self.command.env}, stdin=subprocess.DEVNULL,
            stdout=self.log, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent,
        )  # fmt: skip
        if wait:
            until(self._answers, f"{self.command.name} answers")

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()

    def stop(self) -> None:
        self._popen.send_signal(signal.SIGSTOP)
        # On a busy machine it runs on for a while.
        os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        self._popen.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        if self._popen.poll() is not None:
            self.log.seek(0)
            raise AssertionError(f"{self.command.name} has ended: {self.log.read()[-2000:].decode(errors='replace')}")
        return read(f"{self.command.url}/health") is not None


class Cluster(AbstractContextManager["Cluster"]):
    """A master and nodes, all ready once it is entered unless `started` is False."""

    def __init__(
        self, nodes: int = 2, node_nbytes: int = 128 << 20, flags: tuple[str, ...] = (SHORT_LEASES, "--client_ttl=120")
    ) -> None:
        ports = free_ports(2 + 2 * nodes)
        self.port = ports[0]
        self.master = Process(master_command(*ports[:2], *flags))
        rest = iter(ports[2:])
        self.nodes = [
            Process(node_command(number, self.port, next(rest), next(rest), node_nbytes)) for number in range(nodes)
        ]

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for one in (*self.nodes, self.master):
            one.kill()

    def start(self) -> None:
        self.master.start()
        for node in self.nodes:
            node.start()

    def tier(self, timeout_s: float = 60.0, **settings: Any) -> MooncakeCluster:
        master = f"127.0.0.1:{self.port}"
        return MooncakeCluster(MooncakeTier(master=master, host="127.0.0.1", timeout_s=timeout_s, **settings))


def cause_of(call: Callable[[], Any]) -> str | None:
    """Of the TierError that a call raises; None where it raises nothing."""
    try:
        call()
    except TierError as error:
        return error.cause
    return None
