"""Which transport reaches a peer: the first of the configured ones that both sides have and that works, tried out.

A transport that does not work for a peer is a log line with the reason, once, and the next one is tried.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from mooncake_connector.config.values import TRANSPORTS
from mooncake_connector.log import get_logger, kind_of, log_once
from transfer.control.handshake import Identity
from transfer.transports.base import Peer, TransferError, Transport, Unavailable
from transfer.transports.cma import CmaTransport
from transfer.transports.cuda.driver import Driver
from transfer.transports.cuda.ipc import CudaIpcTransport
from transfer.transports.memory import Memory
from transfer.transports.shm import ShmTransport
from transfer.transports.tcp import TcpTransport
from transfer.transports.tls import Tls

logger = get_logger(__name__)

DEVICE_NAMES = ("cuda_ipc",)
"""The transports between memory of devices."""
HOST_NAMES = tuple(name for name in TRANSPORTS if name not in DEVICE_NAMES)
"""Those between memory of hosts, the fastest first."""


def make_transports(
    names: Sequence[str],
    memory: Memory,
    identity: Identity,
    *,
    hosts: Sequence[str] = ("127.0.0.1",),
    tls: Tls | None = None,
    driver: Driver | None = None,
) -> Transports:
    """The transports of these names that serve this memory, preferred in this order.

    Args:
        hosts, tls: for tcp, which is left out without a host.
        driver: of the devices that have the memory; None for memory of the host.

    Raises TransferError for an unknown name, and for a host that needs a secret where there is none.
    """
    made: list[Transport] = []
    for name in names:
        if name in TRANSPORTS and ((name in DEVICE_NAMES) is (driver is None) or (name == "tcp" and not hosts)):
            continue
        if name == "cuda_ipc":
            made.append(CudaIpcTransport(memory, identity, driver))
        elif name == "cma":
            made.append(CmaTransport(memory, identity))
        elif name == "shm":
            made.append(ShmTransport(memory, identity))
        elif name == "tcp":
            made.append(TcpTransport(memory, identity, hosts=hosts, tls=tls))
        else:
            raise TransferError(f"transport {name!r} is unknown: there are {', '.join(TRANSPORTS)}")
    return Transports(made)


class Transports:
    """The transports of one process, in the order in which they are preferred. Safe to use from any thread."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}

    def listen(self) -> dict[str, bytes]:
        """Endpoints by name of transport, to be told to peers; one that cannot listen is left out and logged."""
        endpoints = {}
        for name, transport in self._transports.items():
            try:
                endpoints[name] = transport.listen()
            except (OSError, TransferError) as error:
                log_once(f"transfer.listen:{name}", "transport %s cannot listen: %s", name, error, logger=logger)
        return endpoints

    def connect(self, endpoints: Mapping[str, bytes], *, deadline_s: float) -> Peer:
        """A connection to the peer that listens at `endpoints`. Raises Unavailable with what stood in each one's way.

        An attempt takes at most half of the time that is left, so that a peer that hangs on one way has another.
        """
        deadline_at = time.monotonic() + deadline_s
        reasons: list[str] = []
        for name, transport in self._transports.items():
            try:
                if name not in endpoints:
                    raise Unavailable("the peer does not offer it")
                left = deadline_at - time.monotonic()
                is_last = name == next(reversed(self._transports))
                peer = transport.connect(endpoints[name], deadline_s=max(0.001, left if is_last else left / 2))
            except Unavailable as error:
                reasons.append(f"{name}: {error}")
                continue
            for reason in reasons:
                log_once(f"transfer.fallback:{kind_of(reason)}", "%s; using %s", reason, name, logger=logger)
            return peer
        remedy = (
            "" if "tcp" in self._transports else "; set transfer_hosts and secret_file on both sides to allow tcp"
        )
        raise Unavailable("no transport reaches the peer: " + "; ".join(reasons) + remedy)

    def close(self) -> None:
        """Close all of them. May be called twice."""
        for transport in self._transports.values():
            transport.close()

    def __enter__(self) -> Transports:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
