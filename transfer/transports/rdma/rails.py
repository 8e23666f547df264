"""Which ports of RDMA cards this host has, from sysfs, and by which of its addresses peers reach one.

RoCE v2 addresses a port by an entry of its GID table that is an IP address; InfiniBand by its LID and first GID.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
ROCE_V2, ROCE_V1, INFINIBAND = "RoCE v2", "RoCE v1", "InfiniBand"
_ACTIVE = "4:"
_LINK_LOCAL, _MAPPED = b"\xfe\x80", bytes(10) + b"\xff\xff"
_ETHERNET = "Ethernet"


@dataclass(frozen=True, slots=True)
class Rail:
    """A port of a card with one of its addresses.

    Args:
        gid: 16 bytes; entry `gid_index` of the port's table.
        kind: what that entry is for.
    """

    device: str
    port: int
    is_up: bool
    kind: str
    gid: bytes
    gid_index: int

    @property
    def address(self) -> str:
        """As it is written, an IPv4 address where the GID is one."""
        return str(ip_address(self.gid[12:] if self.gid.startswith(_MAPPED) else self.gid))

    def __str__(self) -> str:
        return f"{self.device} port {self.port} ({self.kind}, {self.address})"


def rails(sysfs: Path = SYSFS) -> list[Rail]:
    """All that there are; none where the kernel knows no card."""
    ports = [(device.name, port) for device in _entries(sysfs) for port in _entries(device / "ports")]
    return [rail for device, port in ports for rail in _of(device, port)]


def choose(found: Sequence[Rail], host: str, device: str = "") -> Rail | None:
    """The one that serves best where peers know this process by the address `host`; None where none does.

    Args:
        device: the card to use; whichever serves best where it is empty.
    """
    packed = ip_address(host).packed
    wanted = packed if len(packed) == 16 else _MAPPED + packed

    def rank(rail: Rail) -> tuple[bool, bool, bool, str, int, int]:
        is_far = rail.kind == ROCE_V2 and rail.gid.startswith(_LINK_LOCAL)
        is_ip4 = rail.kind == INFINIBAND or rail.gid.startswith(_MAPPED)
        return rail.gid != wanted, is_far, not is_ip4, rail.device, rail.port, rail.gid_index

    usable = [rail for rail in found if rail.is_up and rail.kind != ROCE_V1 and device in ("", rail.device)]
    return min(usable, key=rank, default=None)


def _of(device: str, port: Path) -> Iterator[Rail]:
    is_up = _read(port / "state").startswith(_ACTIVE)
    is_ethernet = _read(port / "link_layer") == _ETHERNET
    for entry in _entries(port / "gids"):
        gid = bytes.fromhex(_read(entry).replace(":", ""))
        if len(gid) != 16 or not any(gid):
            continue
        if is_ethernet:
            kind = ROCE_V2 if _read(port / "gid_attrs" / "types" / entry.name) == ROCE_V2 else ROCE_V1
            yield Rail(device, int(port.name), is_up, kind, gid, int(entry.name))
        elif entry.name == "0":
            yield Rail(device, int(port.name), is_up, INFINIBAND, gid, 0)


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
