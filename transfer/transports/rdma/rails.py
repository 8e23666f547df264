"""Which ports of RDMA cards this host has, from sysfs, which of them are used, and by which address peers reach one.

RoCE v2 addresses a port by an entry of its GID table that is an IP address; InfiniBand by its LID and first GID.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")
ROCE_V2, ROCE_V1, INFINIBAND = "RoCE v2", "RoCE v1", "InfiniBand"
MAX_RAILS = 8
"""That a process uses together."""
_ACTIVE = "4:"
_LINK_LOCAL, _MAPPED = b"\xfe\x80", bytes(10) + b"\xff\xff"
_ETHERNET = "Ethernet"
_IP4_NETWORK_BITS, _NETWORK_BITS = 120, 64
"""Of a GID, what two ports share that are in one network: a /24, or the subnet prefix."""


@dataclass(frozen=True, slots=True)
class Rail:
    """A port of a card with one of its addresses.

    Args:
        gid: 16 bytes; entry `gid_index` of the port's table.
        kind: what that entry is for.
        node: NUMA node that the card is at; -1 where nobody knows.
        gbit_per_s: of its link; 0 where nobody knows.
    """

    device: str
    port: int
    is_up: bool
    kind: str
    gid: bytes
    gid_index: int
    node: int = -1
    gbit_per_s: float = 0.0

    @property
    def name(self) -> str:
        """As in the configuration and the metrics."""
        return f"{self.device}:{self.port}"

    @property
    def address(self) -> str:
        """As it is written, an IPv4 address where the GID is one."""
        return str(ip_address(self.gid[12:] if self.gid.startswith(_MAPPED) else self.gid))

    def __str__(self) -> str:
        return f"{self.device} port {self.port} ({self.kind}, {self.address})"


def rails(sysfs: Path = SYSFS) -> list[Rail]:
    """All that there are; none where the kernel knows no card."""
    ports = [(device, port) for device in _entries(sysfs) for port in _entries(device / "ports")]
    return [rail for device, port in ports for rail in _of(device, port)]


def is_up(rail: Rail, sysfs: Path = SYSFS) -> bool:
    """Now."""
    return _read(sysfs / rail.device / "ports" / str(rail.port) / "state").startswith(_ACTIVE)


def index_now(rail: Rail, sysfs: Path = SYSFS) -> int:
    """Of its address, which a port that was down may have elsewhere. Raises OSError where it has it no more."""
    gids = sysfs / rail.device / "ports" / str(rail.port) / "gids"
    if _gid(gids / str(rail.gid_index)) == rail.gid:
        return rail.gid_index
    for found in _of(sysfs / rail.device, gids.parent):
        if (found.gid, found.kind) == (rail.gid, rail.kind):
            return found.gid_index
    raise OSError(f"{rail.device} port {rail.port} has lost its address {rail.address}")


def chosen(
    found: Sequence[Rail],
    hosts: Sequence[str],
    ports: Sequence[str] = (),
    gid_index: int | None = None,
    distances: dict[int, int] | None = None,
    links: Mapping[str, int] | None = None,
) -> list[Rail]:
    """Those to use together, the best first: the same kind of link, about as fast, as near to this process's memory.

    Args:
        hosts: the addresses by which peers know this process: ports that have these come first.
        ports: the names of those to use; then it is these that are up, in this order.
        distances: see `distances`.
        links: see `links_to`, of the device whose memory it is. Of cards that are about as fast those with the fewest
            are used then, and these alone.
    """
    wanted = [_packed(host) for host in hosts]
    away = distances or {}

    def rank(rail: Rail) -> tuple[int, int, int, bool, bool, str, int, int]:
        named = _place(rail, ports) if ports else 0
        known = wanted.index(rail.gid) if rail.gid in wanted else len(wanted)
        is_far = rail.kind == ROCE_V2 and rail.gid.startswith(_LINK_LOCAL)
        is_ip4 = rail.kind == INFINIBAND or rail.gid.startswith(_MAPPED)
        return named, known, away.get(rail.node, 0), is_far, not is_ip4, rail.device, rail.port, rail.gid_index

    usable = [
        rail for rail in found
        if rail.is_up and rail.kind != ROCE_V1 and gid_index in (None, rail.gid_index)
        and (not ports or _place(rail, ports) < len(ports))
    ]  # fmt: skip
    best: dict[str, Rail] = {}
    for rail in sorted(usable, key=rank):
        best.setdefault(rail.name, rail)
    several = list(best.values())
    if several and not ports:
        alike = [rail for rail in several if rail.kind == several[0].kind]
        nearest = min((away[rail.node] for rail in alike if rail.node in away), default=0)
        near = [rail for rail in alike if away.get(rail.node, nearest) == nearest]
        fastest = max((rail.gbit_per_s for rail in near), default=0.0)
        together = {rail.name for rail in near if rail.gbit_per_s >= fastest / 2}
        several = _at_device(alike, links or {}) or [
            rail for rail in several if rail.name in together or rail.gid in wanted
        ]
    return several[:MAX_RAILS]


def _at_device(found: Sequence[Rail], links: Mapping[str, int]) -> list[Rail]:
    fastest = max(rail.gbit_per_s for rail in found)
    fast = [rail for rail in found if rail.gbit_per_s >= fastest / 2 and rail.device in links]
    fewest = min((links[rail.device] for rail in fast), default=0)
    return [rail for rail in fast if links[rail.device] == fewest]


def links_to(address: str, sysfs: Path = SYSFS, pci: Path = PCI) -> dict[str, int]:
    """PCIe links between the device with this PCI address ("0000:17:00.0") and each card below the same host bridge, by
    the card's name."""
    ours = _below_bridge(pci / address)
    found: dict[str, int] = {}
    for card in _entries(sysfs):
        theirs = _below_bridge(card / "device")
        if shared := len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))):
            found[card.name] = len(ours) + len(theirs) - 2 * shared
    return found


def _below_bridge(device: Path) -> list[str]:
    """Where sysfs has it: the host bridge ("pci0000:16"), then what is between, then the device itself."""
    parts = Path(os.path.realpath(device)).parts
    bridge = next((place for place, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return list(parts[bridge:])


def unused(ports: Sequence[str], used: Sequence[Rail]) -> list[str]:
    """Which of these names are of none of the rails."""
    return [name for name in ports if all(_place(rail, [name]) for rail in used)]


def distances(nodes: Path = NODES) -> dict[int, int]:
    """From the processors that this process may use to each NUMA node; empty where the kernel does not say."""
    ours = os.sched_getaffinity(0)
    found: dict[int, int] = {}
    for node in _entries(nodes):
        if not node.name.startswith("node") or not ours & _numbers(_read(node / "cpulist")):
            continue
        for other, distance in zip(_known(nodes), _read(node / "distance").split(), strict=False):
            found[other] = min(int(distance), found.get(other, int(distance)))
    return found


def matched(ours: Sequence[bytes], theirs: Sequence[bytes]) -> list[int]:
    """Which of our ports serves each of the peer's, by their GIDs: of the same network, each as often as the others."""
    uses = [0] * len(ours)
    serving: list[int] = []
    for there in theirs:
        best = min(range(len(ours)), key=lambda i: (-_in_common(ours[i], there), uses[i], i))
        uses[best] += 1
        serving.append(best)
    return serving


def _in_common(gid: bytes, other: bytes) -> int:
    """Leading bits, those of a network at most."""
    most = _IP4_NETWORK_BITS if gid.startswith(_MAPPED) else _NETWORK_BITS
    differing = int.from_bytes(gid, "big") ^ int.from_bytes(other, "big")
    return min(most, 128 - differing.bit_length())


def _packed(host: str) -> bytes:
    packed = ip_address(host).packed
    return packed if len(packed) == 16 else _MAPPED + packed


def _place(rail: Rail, ports: Sequence[str]) -> int:
    return next((place for place, name in enumerate(ports) if name in (rail.device, rail.name)), len(ports))


def _of(device: Path, port: Path) -> Iterator[Rail]:
    is_up = _read(port / "state").startswith(_ACTIVE)
    is_ethernet = _read(port / "link_layer") == _ETHERNET
    node = _read(device / "device" / "numa_node")
    speed = _read(port / "rate").partition(" ")[0]  # "100 Gb/sec (4X EDR)"
    about = int(node) if node else -1, float(speed) if speed else 0.0
    for entry in _entries(port / "gids"):
        gid = _gid(entry)
        if len(gid) != 16 or not any(gid):
            continue
        if is_ethernet:
            kind = ROCE_V2 if _read(port / "gid_attrs" / "types" / entry.name) == ROCE_V2 else ROCE_V1
            yield Rail(device.name, int(port.name), is_up, kind, gid, int(entry.name), *about)
        elif entry.name == "0":
            yield Rail(device.name, int(port.name), is_up, INFINIBAND, gid, 0, *about)


def _gid(entry: Path) -> bytes:
    return bytes.fromhex(_read(entry).replace(":", ""))


def _known(nodes: Path) -> list[int]:
    return sorted(int(node.name[4:]) for node in _entries(nodes) if node.name[4:].isdecimal())


def _numbers(text: str) -> set[int]:
    """Of a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return []


def _read(path: Path) -> str:
    """Empty where the kernel has nothing to say, as of an entry that is not in use."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
