"""Two network namespaces that are to servers what two hosts are, and the link between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LINK = Path(__file__).parent / "link.py"
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
    """One namespace: `control` is its address for clients, `data` the one on the link to the other host."""

    name: str
    control: str
    data: str

    @property
    def launcher(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


class Link:
    """The link that KV travels over; clients do not."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def set(self, *, lose: float = 0.0, delay_ms: float = 0.0, cut: bool = False) -> None:
        """From now on lose this share of packets, and delay the others; or let none through."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"lose": lose, "delay_ms": delay_ms, "cut": cut}) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host, Link]]:
    """Raises NoNamespaces."""
    number = os.getpid() % 250
    hosts = [Host(f"pd{os.getpid()}{end}", f"10.78.{number}.{4 * i + 2}", f"10.79.{number}.{i + 1}")
             for i, end in enumerate("ab")]  # fmt: skip
    if not shutil.which("ip") or os.geteuid() != 0:
        raise NoNamespaces("no `ip`, or not root")
    try:
        for i, host in enumerate(hosts):
            run(SET_UP.format(name=host.name, outside=f"10.78.{number}.{4 * i + 1}", inside=host.control))
        with subprocess.Popen(
            [sys.executable, str(LINK), *(f"{host.name}={host.data}/24" for host in hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdin and process.stdout and process.stderr
            try:
                if process.stdout.readline() != "ready\n":
                    raise NoNamespaces(process.stderr.read())
                yield hosts[0], hosts[1], Link(process)
            finally:
                process.stdin.close()
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def run(commands: str) -> None:
    done = subprocess.run(["bash", "-c", commands], capture_output=True, text=True)
    if done.returncode:
        raise NoNamespaces(done.stderr)
