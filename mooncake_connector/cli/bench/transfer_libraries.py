"""What a library reaches alone: the other process reads the same pieces with it, straight to their places.

Also while a second thread copies as much: what is read into staging has to be copied, so more cannot be expected.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from mooncake_connector.cli.bench.measure import BenchError
from mooncake_connector.cli.bench.transfer_scale import Int64, Scale
from transfer.transports.base import Region
from transfer.transports.libraries.reader import Reader
from transfer.transports.libraries.staging import SLOT_NBYTES
from transfer.transports.libraries.transport import LibraryTransport
from transfer.transports.memory import Memory
from transfer.transports.registry import names, transport_class
from transfer.transports.vectors import copy_out

LIBRARIES = tuple(name for name in names() if issubclass(transport_class(name), LibraryTransport))
_DONE = b"k"


class _Order(msgspec.Struct, frozen=True):
    """What the other process is told, in one line."""

    library: str
    origin: bytes
    address: int
    scale: Scale
    copies: bool


class Alone:
    """A library between two processes, without us. Raises TransferError where it does not work."""

    def __init__(self, library: str, source: np.ndarray[Any, Any], connection: socket.socket) -> None:
        self._library, self._source, self._connection = library, source, connection
        self._transport = _transport(library)
        self._transport.reader.offer(Region(source.ctypes.data, source.nbytes))

    def reads(self, scale: Scale, *, copies: bool = False) -> Callable[[], None]:
        """Each call has the other process read all pieces of `scale` once, and copy as much meanwhile."""
        origin = self._transport.reader.origin()
        order = msgspec.json.encode(_Order(self._library, origin, self._source.ctypes.data, scale, copies)) + b"\n"

        def read() -> None:
            self._connection.sendall(order)
            if self._connection.recv(1) != _DONE:
                raise BenchError(f"{self._library} alone: the other process could not read")

        return read

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._connection.close()
        self._transport.close()


def read_alone(connection: socket.socket, data: np.ndarray[Any, Any]) -> None:
    """The other process's side of it."""
    readers: dict[str, tuple[Reader, str]] = {}
    with contextlib.ExitStack() as stack, connection.makefile("rb") as lines:
        for line in lines:
            order = msgspec.json.decode(line, type=_Order)
            if order.library not in readers:
                transport = _transport(order.library)
                stack.callback(transport.close)
                reader = transport.reader
                reader.stage(data.ctypes.data, data.nbytes)
                readers[order.library] = reader, reader.meet(order.origin)
            reader, name = readers[order.library]
            scale = order.scale
            there, here = scale.scattered(order.address, seed=1), scale.scattered(data.ctypes.data, seed=2)
            sizes = np.full(scale.pieces, scale.piece_nbytes, dtype=np.int64)
            copying = threading.Thread(target=_copy, args=(here + scale.piece_nbytes, sizes)) if order.copies else None
            if copying is not None:
                copying.start()
            reader.read(name, there, here, sizes)
            if copying is not None:
                copying.join()
            connection.sendall(_DONE)


def _copy(places: Int64, sizes: Int64) -> None:
    """To the places beside those that are read into, from a slot as large as one of staging."""
    slot = np.ones(SLOT_NBYTES, dtype=np.uint8)
    step = max(1, SLOT_NBYTES // int(sizes[0]))
    for start in range(0, len(places), step):
        part = slice(start, start + step)
        copy_out(slot.ctypes.data, places[part], sizes[part])


def _transport(library: str) -> LibraryTransport:
    kind = transport_class(library)
    assert issubclass(kind, LibraryTransport)
    return kind(Memory())
