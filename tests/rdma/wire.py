"""A cable in the emulated machine, a card at each end, that loses, delays and breaks.

The machine has both ends, and would hand over what one of its addresses sends to another without any cable: so what a
card sends is routed by tables of its own, before those of the machine's own addresses.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.8"
_ALL, _IPV4, _ROCE = 0x0003, 0x0800, (4791).to_bytes(2, "big")
"""Protocols of packets; RoCE v2's port of UDP."""
_BACKLOG = 100_000
"""Packets that may wait for the machine's only processor; more would be lost where no test says so."""


@dataclass(frozen=True, slots=True)
class End:
    """Of the cable: the card's name, which is its interface's too, and its address."""

    name: str
    number: int

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"


class Wire:
    """`near` and `far` are its ends. There is one, once it is made until the machine ends."""

    near, far = End("near", 1), End("far", 2)

    def __init__(self) -> None:
        for module in ("veth", "sch_netem"):
            _run(f"modprobe {module}")
        _set("core/netdev_max_backlog", _BACKLOG)
        _set("ipv4/conf/all/rp_filter", 0)
        _run("ip link add near type veth peer name far")
        for end in (self.near, self.far):
            _set(f"ipv4/conf/{end.name}/rp_filter", 0)
            _set(f"ipv4/conf/{end.name}/accept_local", 1)
            _set(f"ipv6/conf/{end.name}/disable_ipv6", 1)
            _run(f"ip link set {end.name} mtu 9000 up")
            _run(f"ip addr add {end.address}/24 dev {end.name}")
            _run(f"ip rule add pref {end.number} oif {end.name} table {end.number}")
            _run(f"rdma link add {end.name} type rxe netdev {end.name}")
        _run("ip rule add pref 100 lookup local")
        _run("ip rule del pref 0")
        self._route()

    def harm(self, end: End, how: str) -> None:
        """What `tc-netem` does to all that this end sends, such as `loss 1% delay 10ms`."""
        _run(f"tc qdisc replace dev {end.name} root netem limit {_BACKLOG} {how}")

    def dropped(self, end: End) -> int:
        """Packets of this end that were lost since `harm`."""
        said = _run(f"tc -s qdisc show dev {end.name}")
        return int(said.partition("dropped ")[2].partition(",")[0])

    @contextmanager
    def packets(self, end: End) -> Iterator[list[tuple[str, int]]]:
        """Whose they are and their traffic class: of all that cards send or get there meanwhile, once it is over."""
        found: list[tuple[str, int]] = []
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as seen:
            seen.bind((end.name, _ALL))
            yield found
            with suppress(BlockingIOError):
                while True:
                    packet, address = seen.recvfrom(64, socket.MSG_DONTWAIT)
                    if address[1] == _IPV4 and packet[9] == socket.IPPROTO_UDP and packet[22:24] == _ROCE:
                        found.append((socket.inet_ntoa(packet[12:16]), packet[1]))

    def set_down(self, end: End) -> None:
        _run(f"ip link set {end.name} down")

    def mend(self) -> None:
        """Nothing is harmed or down any more."""
        for end in (self.near, self.far):
            subprocess.run(["tc", "qdisc", "del", "dev", end.name, "root"], capture_output=True)
            _run(f"ip link set {end.name} up")
        self._route()
        for end in (self.near, self.far):
            state = Path(f"/sys/class/infiniband/{end.name}/ports/1/state")
            while "ACTIVE" not in state.read_text():  # the kernel tells the cards a little later
                time.sleep(0.02)

    def _route(self) -> None:
        """Routes go when an interface is set down."""
        for end, other in ((self.near, self.far), (self.far, self.near)):
            _run(f"ip route replace {other.address} dev {end.name} table {end.number}")


def _run(command: str) -> str:
    return subprocess.run(command.split(), check=True, stdout=subprocess.PIPE, text=True).stdout


def _set(name: str, value: int) -> None:
    Path("/proc/sys/net", name).write_text(str(value))
