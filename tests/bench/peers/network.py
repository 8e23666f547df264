"""Two network namespaces with links of limited speed between them, for rows that need a network. It takes root.

The names tell which process made them: what a killed run left behind is removed when the next one starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mooncake_connector.cli.bench.measure import BenchError

LINKS = 2
LINK_GBITS = 1.0
_PREFIX = "mcbench"
_NAMES = re.compile(rf"^{_PREFIX}(\d+)[ab]\b", re.MULTILINE)


class Network:
    """Both namespaces: `here` with `sources`, `there` with `targets`, one address for each link."""

    def __init__(self) -> None:
        self.here, self.there = f"{_PREFIX}{os.getpid()}a", f"{_PREFIX}{os.getpid()}b"
        self.sources = [f"10.77.{number}.1" for number in range(LINKS)]
        self.targets = [f"10.77.{number}.2" for number in range(LINKS)]

    def inside(self, namespace: str, command: list[str]) -> list[str]:
        """The command that runs `command` in there."""
        return ["ip", "netns", "exec", namespace, *command]

    def set_link(self, number: int, state: str) -> None:
        """`down` lets packets vanish: nobody is told, as with a cable that was pulled."""
        _ip("-n", self.there, "link", "set", f"there{number}", state)

    def make(self) -> None:
        for namespace in (self.here, self.there):
            _ip("netns", "add", namespace)
        for number in range(LINKS):
            ends = ((self.here, f"here{number}", self.sources), (self.there, f"there{number}", self.targets))
            (here, near, _), (there, far, _) = ends
            _ip("link", "add", near, "netns", here, "type", "veth", "peer", "name", far, "netns", there)
            for namespace, device, addresses in ends:
                _ip("-n", namespace, "address", "add", f"{addresses[number]}/24", "dev", device)
                _ip("-n", namespace, "link", "set", device, "up")
            limit = ("tbf", "rate", f"{LINK_GBITS:g}gbit", "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", here, "qdisc", "add", "dev", near, "root", *limit)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Raises BenchError where namespaces or links cannot be made."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise BenchError("network namespaces take root, and `ip` and `tc` of iproute2")
    _remove_leftovers()
    made = Network()
    try:
        made.make()
        yield made
    finally:
        for namespace in (made.here, made.there):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _remove_leftovers() -> None:
    """Namespaces, and with them links, of runs that are over."""
    for match in _NAMES.finditer(_ip("netns", "list")):
        try:
            lives = b"bench" in Path(f"/proc/{match[1]}/cmdline").read_bytes()
        except OSError:
            lives = False
        if not lives:
            subprocess.run(["ip", "netns", "delete", match[0]], capture_output=True)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise BenchError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
