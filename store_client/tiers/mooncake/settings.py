"""Settings of the client: ours, then Mooncake's own file and variables, then defaults.

As in Mooncake, the file of MOONCAKE_CONFIG_PATH replaces the variables. Unlike there nothing but the master must be
set, and without a segment of its own this host stores nothing for others.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_connector.config.tiers import MooncakeTier
from mooncake_connector.config.values import shown
from store_client.tiers.base import TierError

_BUFFER_NBYTES = 16 << 20
"""What the library keeps for calls that this package does not use; it wants some."""
_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]?)i?b?", re.IGNORECASE)
_MASTER = re.compile(r"[^\s/;,]+:\d{1,5}|[a-z0-9]+://[^\s/]+")
# Ours, in Mooncake's file, in its variables.
_NAMES = {
    "master": ("master_server_address", ("MOONCAKE_MASTER",)),
    "metadata": ("metadata_server", ("MOONCAKE_TE_META_DATA_SERVER",)),
    "host": ("local_hostname", ("MOONCAKE_LOCAL_HOSTNAME", "LOCAL_HOSTNAME")),
    "protocol": ("protocol", ("MOONCAKE_PROTOCOL",)),
    "device": ("device_name", ("MOONCAKE_DEVICE",)),
    "segment": ("global_segment_size", ("MOONCAKE_GLOBAL_SEGMENT_SIZE",)),
    "buffer": ("local_buffer_size", ("MOONCAKE_LOCAL_BUFFER_SIZE",)),
    "tenant": ("tenant_id", ("MOONCAKE_TENANT_ID",)),
}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """All that a client is set up with.

    Args:
        master: host:port, or the connection string of an election (etcd://HOST:PORT;HOST:PORT).
        stall_s: a transfer that gets no further for so long, whole seconds, is dropped with its connection.
        rpc_s: for the master to answer one call.
    """

    master: str
    metadata: str
    host: str
    protocol: str
    device: str
    segment_nbytes: int
    buffer_nbytes: int
    replicas: int
    soft_pin: bool
    tenant: str | None
    cluster_id: str | None
    stall_s: int
    rpc_s: float

    def variables(self) -> dict[str, str]:
        """What the library reads from the environment only. The first group is what this package relies on."""
        held = {
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(self.stall_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(self.stall_s),
            "MC_RPC_TIMEOUT_MS": str(int(self.rpc_s * 1000)),
            "MC_RPC_CONNECT_TIMEOUT_MS": str(int(self.rpc_s * 1000)),
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        }
        if self.protocol == "tcp":
            held["MC_FORCE_TCP"] = "1"  # or it takes RDMA wherever it finds a device
        if self.cluster_id is not None:
            held["MC_STORE_CLUSTER_ID"] = self.cluster_id
        return held

    @property
    def arguments(self) -> tuple[str, str, int, int, str, str, str]:
        """Of `setup`, in its order."""
        return (
            self.host, self.metadata, self.segment_nbytes, self.buffer_nbytes, self.protocol, self.device, self.master,
        )  # fmt: skip

    @property
    def address(self) -> tuple[str, int] | None:
        """Where the master listens; None where an election decides that."""
        return _address(self.master)


DEFAULT_VARIABLES = {
    # Otherwise each transfer opens a socket, and ports run out.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    # So that a node that hangs holds the others' pages up less.
    "MC_TCP_LANES_PER_PEER": "8",
    "MC_LOG_LEVEL": "ERROR",
}
"""Of the environment too, where nobody has set them."""


def client_settings(tier: MooncakeTier, environ: Mapping[str, str]) -> ClientSettings:
    """Raises TierError, lasting, where no master is named or something cannot be read."""
    path = environ.get("MOONCAKE_CONFIG_PATH")
    found = _file(tier, Path(path)) if path else _variables(environ)
    try:
        return _merged(tier, found)
    except ValueError as error:
        where = f"the file {path} (MOONCAKE_CONFIG_PATH)" if path else "the environment"
        raise _wrong(tier, f"{error}, from {where}") from None


def _merged(tier: MooncakeTier, found: Mapping[str, Any]) -> ClientSettings:
    def text(name: str, default: str) -> str:
        own = getattr(tier, name)
        return str(own if own is not None else found.get(name) or default)

    def size(name: str, default: int) -> int:
        own = getattr(tier, name)
        return int(own) if own is not None else _size(name, found.get(name, default))

    master = text("master", "")
    if not master:
        raise _wrong(tier, "no master is named: set `master: HOST:PORT`, or MOONCAKE_MASTER or MOONCAKE_CONFIG_PATH")
    metadata = text("metadata", "P2PHANDSHAKE")
    for name, value in {"master": master, "metadata": metadata}.items():
        if "@" in value:
            raise _wrong(tier, f"{name} has an @, and is not shown here: expected no user and password in an address")
    if not _MASTER.fullmatch(master):
        raise _wrong(tier, f"master is {shown(master)}: expected HOST:PORT, or etcd://HOST:PORT;HOST:PORT")
    protocol = text("protocol", "tcp").lower()
    return ClientSettings(
        master=master,
        metadata=metadata,
        host=text("host", "") or _own_address(_address(master)),
        protocol=protocol,
        device=text("device", ""),
        segment_nbytes=size("segment", 0),
        buffer_nbytes=size("buffer", _BUFFER_NBYTES),
        replicas=tier.replicas,
        soft_pin=tier.soft_pin,
        tenant=text("tenant", "") or None,
        cluster_id=tier.cluster_id,
        stall_s=min(max(int(tier.timeout_s / 2), 1), 3),
        rpc_s=min(max(tier.timeout_s / 2, 0.2), 30.0),
    )


def _file(tier: MooncakeTier, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _wrong(tier, f"the file {path} (MOONCAKE_CONFIG_PATH) cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise _wrong(tier, f"the file {path} (MOONCAKE_CONFIG_PATH) holds no JSON object")
    return {name: content[theirs] for name, (theirs, _) in _NAMES.items() if theirs in content}


def _variables(environ: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, (_, variables) in _NAMES.items():
        if value := next((environ[one] for one in variables if environ.get(one)), None):
            found[name] = value
    return found


def _wrong(tier: MooncakeTier, text: str) -> TierError:
    return TierError(f"tier {tier.title} (mooncake): {text}", "unavailable", lasting=True)


def _size(name: str, value: Any) -> int:
    """As Mooncake reads sizes: a number, or one with a suffix of powers of 1024, whatever it is called."""
    match = _SIZE.fullmatch(str(value).strip())
    try:
        return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " ")) if match else int(str(value))
    except ValueError:
        raise ValueError(f"{name} is {value!r}: expected a size such as 4GB") from None


def _address(master: str) -> tuple[str, int] | None:
    host, colon, port = master.rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdigit() and "://" not in master else None


def _own_address(master: tuple[str, int] | None) -> str:
    """This host's address as the master sees it; nothing is sent to find out."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*(master or ("192.0.2.1", 9)), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.connect(target)
            return str(one.getsockname()[0])
    except OSError:
        return "127.0.0.1"
