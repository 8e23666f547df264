"""TLS below the tcp transport: the same streams, encrypted, with certificates on both sides.

Each side must show a certificate of the deployment's own authority; names in certificates are not looked at, since
peers are known by address. The handshake of the shared secret runs inside as ever.
"""

from __future__ import annotations

import ctypes
import socket
import ssl
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from transfer.transports.base import TransferError
from transfer.transports.channel import MANY_NBYTES, Channel
from transfer.transports.records import RECORD_NBYTES, Records
from transfer.transports.vectors import SMALL_NBYTES, Small, Vector, address_of, copy_in, copy_out

_TURN_NBYTES = 1 << 20
"""Moved in one step: what `Memory.revoke` may have to wait for."""
_LONG_NBYTES = 32 << 20
"""The same at most where calls wait: enough for the 5 ms after each."""
_WAIT_TIMEVAL = struct.pack("ll", 0, 5000)
"""5 ms, as the kernel's timeval: how long such a call waits for each record, or for room for one."""
_LONG_S = 0.1
"""What took longer is followed by less."""
_of_thread = threading.local()


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


class _Turn(NamedTuple):
    """How much is moved before others get their turn, and of how many bytes a piece is moved by a call of its own."""

    most_nbytes: int
    direct_nbytes: int
    waits: bool = False


class TlsChannel(Channel):
    """See the module.

    Where `Records` can be had, much moves in long calls, as on a plain channel. What lies in small pieces goes through
    a stage, since a call moves one piece.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        super().__init__(connection)
        self._tls = connection
        self._records = Records.of(connection)
        self._long_nbytes = _LONG_NBYTES // 4

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
        super().hurry()
        self._wait_for(_WAIT_TIMEVAL)
        self._tls.setblocking(False)

    def close(self) -> None:
        self._records = None
        super().close()

    @property
    def pending(self) -> bool:  # type: ignore[override]
        return self._records.pending if self._records is not None else self._tls.pending() > 0

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
        if self._records is not None and (moved := self._records.write(data, len(data))):
            return moved
        with _as_plain():
            return self._tls.send(data)

    def fill(self, small: Small, start: int = 0) -> int:
        address, nbytes = small.bytes.buffer_info()
        return self._read(address + start, nbytes - start, _Turn(nbytes, 0))

    def send_vector(self, vector: Vector) -> int:
        return self._at_length(partial(self._turn, vector, self._send_some), vector.left)

    def fill_vector(self, vector: Vector) -> int:
        return self._at_length(partial(self._turn, vector, self._fill_some), vector.left)

    def _turn(self, vector: Vector, some: Callable[[Vector, _Turn], int], *, waits: bool = False) -> int:
        """One call that waits, or several that do not."""
        if waits and self._records is not None:
            return self._long_turn(vector, some)
        total = 0
        while vector.left and total < _TURN_NBYTES:
            try:
                moved = some(vector, _Turn(_TURN_NBYTES - total, SMALL_NBYTES))
            except BlockingIOError:
                if not total:
                    raise
                break
            if not moved:
                break
            vector.advance(moved)
            total += moved
        return total

    def _long_turn(self, vector: Vector, some: Callable[[Vector, _Turn], int]) -> int:
        """It waits anew for each record: the next one is shorter where this took long."""
        most, began_s = self._long_nbytes, time.monotonic()
        moved = some(vector, _Turn(most, most, waits=True))
        vector.advance(moved)
        took_s = time.monotonic() - began_s
        if took_s > _LONG_S:
            self._long_nbytes = max(most // 2, MANY_NBYTES)
        elif took_s < _LONG_S / 2:
            self._long_nbytes = min(most * 2, _LONG_NBYTES)
        return moved

    def _send_some(self, vector: Vector, turn: _Turn) -> int:
        address, nbytes = next(vector.pieces())
        nbytes = min(nbytes, turn.most_nbytes)
        if self._records is None or (self._is_direct(nbytes, vector, turn) and nbytes >= self._records.owed):
            return self._write(address, nbytes, turn)
        pieces = vector.next_pieces(turn.most_nbytes, below=turn.direct_nbytes)
        if int(pieces[1].sum()) < max(1, self._records.owed):
            pieces = vector.next_pieces(RECORD_NBYTES)
        nbytes = int(pieces[1].sum())
        stage = _stage_of(nbytes)
        copy_in(stage, *pieces)
        return self._write(stage, nbytes, turn)

    def _fill_some(self, vector: Vector, turn: _Turn) -> int:
        address, nbytes = next(vector.pieces())
        if self._is_direct(nbytes, vector, turn):
            return self._read(address, min(nbytes, turn.most_nbytes), turn)
        nbytes = int(vector.next_pieces(turn.most_nbytes, below=turn.direct_nbytes)[1].sum())
        stage = _stage_of(nbytes)
        moved = self._read(stage, nbytes, turn)
        if moved:
            copy_out(stage, *vector.next_pieces(moved))
        return moved

    def _is_direct(self, nbytes: int, vector: Vector, turn: _Turn) -> bool:
        return self._records is None or nbytes >= min(turn.direct_nbytes, vector.left) or vector.left <= SMALL_NBYTES

    def _read(self, address: int, nbytes: int, turn: _Turn) -> int:
        if self._records is not None and (moved := self._records.read(address, nbytes, waits=turn.waits)):
            return moved
        with _as_plain():
            return self._tls.recv_into(_memory(address, nbytes))

    def _write(self, address: int, nbytes: int, turn: _Turn) -> int:
        if self._records is not None and (moved := self._records.write(address, nbytes, waits=turn.waits)):
            return moved
        with _as_plain():
            return self._tls.send(_memory(address, nbytes))


def _stage_of(nbytes: int) -> int:
    """Where so much may lie until this thread asks again."""
    stage: npt.NDArray[np.uint8] | None = getattr(_of_thread, "stage", None)
    if stage is None or len(stage) < nbytes:
        stage = _of_thread.stage = np.empty(max(nbytes, _TURN_NBYTES), dtype=np.uint8)
    return address_of(stage)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


@contextmanager
def _as_plain() -> Iterator[None]:
    try:
        yield
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
    except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
        raise ConnectionResetError("closed by the peer") from None
