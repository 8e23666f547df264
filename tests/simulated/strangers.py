"""One who dials a listener of ours and says what he likes, byte by byte."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress

from transfer.handshake import Client, Identity, shake
from transfer.tcp import decode_endpoint


def dial(port: int) -> closing[socket.socket]:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    return closing(connection)


def greet(connection: socket.socket, purpose: str, identity: Identity) -> None:
    """Pass the handshake."""
    shake(connection, Client(identity, purpose, bytes(16)), time.monotonic() + 30)
    connection.settimeout(30)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side closes, whatever it says first. Raises TimeoutError where it does not."""
    with suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def tcp_port(endpoint: bytes) -> int:
    """Of an endpoint of the `tcp` transport."""
    return decode_endpoint(endpoint).addresses[0][1]
