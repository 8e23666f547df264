"""One who dials a listener of ours and says what he likes, byte by byte."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from transfer.control.directory import THIS_HOST
from transfer.control.handshake import Client, Identity, shake
from transfer.transports.network import decode_endpoint
from transfer.transports.unix import listen_at_port, port_name, reach


def dial(port: int, *, tcp: bool = False) -> closing[socket.socket]:
    """A connection to what listens at a port of this host, as a Unix socket or over TCP."""
    if tcp:
        return closing(socket.create_connection(("127.0.0.1", port), timeout=120))
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(120)
    reach(connection, port_name(port), time.monotonic() + 120)
    return closing(connection)


@contextmanager
def deaf() -> Iterator[tuple[str, int]]:
    """Where connections of this user are taken, and nothing is ever said."""
    listener, port = listen_at_port(0, 64)
    with listener:
        yield THIS_HOST, port


def greet(connection: socket.socket, purpose: str, identity: Identity) -> None:
    """Pass the handshake."""
    shake(connection, Client(identity, purpose), time.monotonic() + 120)
    connection.settimeout(120)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closes, whatever it says first. Raises TimeoutError where it does not."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def tcp_port(endpoint: bytes) -> int:
    """Of an endpoint of the `tcp` transport."""
    return decode_endpoint(endpoint).addresses[0][1]


def resident_nbytes() -> int:
    """Memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
