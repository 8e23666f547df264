"""TLS below the tcp transport: the same streams, encrypted, with certificates on both sides.

Each side must show a certificate of the deployment's own authority; names in certificates are not looked at, since
peers are known by address. The handshake of the shared secret runs inside as ever.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transfer.transports.base import TransferError
from transfer.transports.channel import Channel
from transfer.transports.vectors import Small, Vector

_TURN_NBYTES = 1 << 20
"""Moved in one step: what `Memory.revoke` may have to wait for."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: this process's certificate and key, and the authority that signs those of all peers."""

    certificate: str
    key: str
    authority: str

    def context(self, *, server: bool) -> ssl.SSLContext:
        """Raises TransferError for files that cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"TLS files {self.certificate}, {self.key}, {self.authority} cannot be used: {error}"
            ) from error
        return context


class TlsChannel(Channel):
    """See the module."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        super().__init__(connection)
        self._tls = connection

    @classmethod
    def accepted(cls, connection: socket.socket, context: ssl.SSLContext) -> TlsChannel:
        """The server's side; `handshake` has to follow."""
        connection.setblocking(False)
        return cls(context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False))

    @classmethod
    def connected(cls, connection: socket.socket, context: ssl.SSLContext) -> TlsChannel:
        """The client's side, after its handshake. Raises OSError."""
        with _as_plain():
            return cls(context.wrap_socket(connection))

    def hurry(self) -> None:
        self._tls.setblocking(False)

    @property
    def pending(self) -> bool:  # type: ignore[override]
        return self._tls.pending() > 0

    def handshake(self) -> None:
        with _as_plain():
            self._tls.do_handshake()

    def recv(self, nbytes: int) -> bytes:
        with _as_plain():
            return self._tls.recv(nbytes)

    def sendall(self, data: bytes | array[int]) -> None:
        with _as_plain():
            self._tls.sendall(data)

    def send(self, data: bytes) -> int:
        with _as_plain():
            return self._tls.send(data)

    def send_vector(self, vector: Vector) -> int:
        return self._move(vector, self._tls.send)

    def fill(self, small: Small, start: int = 0) -> int:
        with _as_plain():
            return self._tls.recv_into(memoryview(small.bytes)[start:])

    def fill_vector(self, vector: Vector) -> int:
        return self._move(vector, self._tls.recv_into)

    def _move(self, vector: Vector, call: Callable[[Any], int]) -> int:
        """One record of 16 KiB a call; the vector is told of whole pieces, which costs less."""
        total, moved = 0, 1
        while moved and vector.left and total < _TURN_NBYTES:
            address, nbytes = next(vector.pieces())
            piece = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            at = 0
            try:
                while moved and at < nbytes and total + at < _TURN_NBYTES:
                    moved = call(piece[at:])
                    at += moved
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not total + at:
                    raise BlockingIOError from None
                moved = 0
            except ssl.SSLZeroReturnError:
                raise ConnectionResetError("closed by the peer") from None
            if at:
                vector.advance(at)
            total += at
        return total


@contextmanager
def _as_plain() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
    except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
        raise ConnectionResetError("closed by the peer") from None
