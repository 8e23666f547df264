"""Network namespaces that are to servers what hosts are, and the network between them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from e2e import link

__all__ = ["ENTER", "LOOPBACK", "Host", "Link", "NoNamespaces", "device_down", "hosts_apart"]

ENTER = ("ip", "netns", "exec")
"""What runs a command in the namespace whose name follows."""

SET_UP = """
set -e
ip netns add {name}
ip -n {name} link set lo up
ip link add {name} type veth peer name c0 netns {name}
ip addr add {outside}/30 dev {name}
ip link set {name} up
ip -n {name} addr add {inside}/30 dev c0
ip -n {name} link set c0 up
"""


class NoNamespaces(Exception):
    """Network namespaces or TUN devices cannot be made here; the message is what stood in the way."""


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace: `control` is its address for clients, `data` the one on the network of the hosts."""

    name: str
    control: str
    data: str

    @property
    def launcher(self) -> tuple[str, ...]:
        """What runs the rest of its arguments there."""
        return (*ENTER, self.name) if self.name else ()

    @property
    def env(self) -> dict[str, str]:
        """For a server: what it says to itself stays in the namespace."""
        return {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} if self.name else {}


LOOPBACK = Host("", "127.0.0.1", "127.0.0.1")
"""No namespace: this machine itself."""


class Link:
    """The network that hosts have among themselves; clients do not use it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def set(
        self,
        *,
        lose: float = 0.0,
        delay_ms: float = 0.0,
        cut: Collection[str] = (),
        cut_after: Mapping[str, int] | None = None,
    ) -> None:
        """From now on lose this share of packets, and delay the others.

        Args:
            cut: `data` addresses of hosts that nothing comes from or goes to, and nobody is told.
            cut_after: the same, once so many bytes were carried to a host.
        """
        self._order({"lose": lose, "delay_ms": delay_ms, "cut": [*cut], "cut_after": dict(cut_after or {})})

    @property
    def cut(self) -> set[str]:
        """Addresses that are cut by now."""
        return set(self._order(None))

    def _order(self, order: Any) -> list[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        found: list[str] = json.loads(self._process.stdout.readline())
        return found


@contextmanager
def device_down(host: Host) -> Iterator[None]:
    """The host's own network device is down meanwhile, as its operator would take it down."""
    command = ("ip", "-n", host.name, "link", "set", link.NAME)
    subprocess.run([*command, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run([*command, "up"], check=True)


@contextmanager
def hosts_apart(count: int) -> Iterator[tuple[list[Host], Link]]:
    """So many hosts, and the network between them. Raises NoNamespaces."""
    if not shutil.which("ip") or os.geteuid() != 0:
        raise NoNamespaces("no `ip`, or not root")
    with closing(socket.socket(socket.AF_UNIX)) as mine:
        number = _take_number(mine)
        hosts = [
            Host(f"h{os.getpid()}n{i}", f"10.78.{number}.{4 * i + 2}", f"10.79.{number}.{i + 1}") for i in range(count)
        ]
        try:
            for i, host in enumerate(hosts):
                run(SET_UP.format(name=host.name, outside=f"10.78.{number}.{4 * i + 1}", inside=host.control))
            with subprocess.Popen(
                [sys.executable, link.__file__, *(f"{host.name}={host.data}/24" for host in hosts)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            ) as process:  # fmt: skip
                assert process.stdin and process.stdout and process.stderr
                try:
                    if process.stdout.readline() != "ready\n":
                        raise NoNamespaces(process.stderr.read())
                    yield hosts, Link(process)
                finally:
                    process.stdin.close()
        finally:
            for host in hosts:
                subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _take_number(mine: socket.socket) -> int:
    """Of a network that nobody uses: no run beside this one, and nothing that is left of one that was killed."""
    for number in range(250):
        listed = ["ip", "-o", "addr", "show", "to", f"10.78.{number}.0/24"]
        if subprocess.run(listed, capture_output=True).stdout:
            continue
        with suppress(OSError):  # taken by a run that has not set it up yet
            mine.bind(f"\0mooncake-connector-test-network-{number}")
            return number
    raise NoNamespaces("250 networks are used already")


def run(commands: str) -> None:
    done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(done.stderr)
