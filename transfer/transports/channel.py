"""A connected stream socket as both of its ends use it; `tls.TlsChannel` is the same, encrypted."""

from __future__ import annotations

import socket
from array import array

from transfer.transports.vectors import Small, Vector, send_small


class Channel:
    """Until `setblocking(False)` its calls wait, as long as `settimeout` says; from then on they raise BlockingIOError.

    Few bytes move without releasing the interpreter lock.
    """

    pending = False
    """Whether bytes have arrived that polling the socket does not show."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.descriptor = connection.fileno()
        self.settimeout, self.setblocking = connection.settimeout, connection.setblocking
        self.close = connection.close

    def handshake(self) -> None:
        """Of the encryption, on the side that was connected to."""

    def recv(self, nbytes: int) -> bytes:
        """b"" at the end, as for all that receive. Raises OSError, as all do."""
        return self.socket.recv(nbytes)

    def sendall(self, data: bytes | array[int]) -> None:
        self.socket.sendall(data)

    def send(self, data: bytes) -> int:
        """Send what is taken now."""
        return send_small(self.descriptor, data)

    def send_vector(self, vector: Vector) -> int:
        """Send what is taken now."""
        return vector.send(self.descriptor)

    def fill(self, small: Small, start: int = 0) -> int:
        """Fill from `start` on with what has arrived; 0 at the end."""
        return small.receive(self.descriptor, start)

    def fill_vector(self, vector: Vector) -> int:
        """Fill with what has arrived; 0 at the end."""
        return vector.receive(self.descriptor)
