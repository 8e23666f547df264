"""Bytes that follow their order on the connection: both sides of `tcp`."""

from __future__ import annotations

import numpy as np

from transfer.control.handshake import LONG_STREAMS_VERSION
from transfer.transports.base import Numbers
from transfer.transports.incoming import Connection
from transfer.transports.memory import Revocable
from transfer.transports.stream import PayloadEncoder, Slice
from transfer.transports.vectors import Vector
from transfer.transports.wire import CopyOrder, CopyStatus

MAX_ORDER_NBYTES = 128 << 20
"""A call that waits moves what it can of it in 20 ms, and may have to be enough for 5 ms: see `channel.Channel`."""
OLDER_ORDER_NBYTES = 32 << 20
"""What a peer takes that speaks no `LONG_STREAMS_VERSION`."""
_scratch = np.empty(MAX_ORDER_NBYTES, dtype=np.uint8)
"""What nobody wants goes here, from all connections; memory is taken when something does."""


class InlineEncoder(PayloadEncoder):
    """The bytes follow the order."""

    def __init__(self, version: int) -> None:
        """The one that both ends speak."""
        self.max_nbytes = MAX_ORDER_NBYTES if version >= LONG_STREAMS_VERSION else OLDER_ORDER_NBYTES

    def encode(self, part: Slice) -> Vector:
        pieces = part.pieces
        order = CopyOrder(part.number, part.write.grant.key, len(pieces.nbytes), pieces.total)
        return Vector.of(pieces.local, pieces.nbytes, head=order.encode(pieces.remote, pieces.nbytes, mark=part.mark))


class InlineConnection(Connection):
    """Fills granted memory from the stream; bytes that may not be written anywhere are read and dropped."""

    max_nbytes = MAX_ORDER_NBYTES

    def execute(self, order: CopyOrder, columns: list[Numbers], held: Revocable) -> bool:
        vector = Vector.of(columns[0], columns[1])
        self._next = lambda: self._take_bytes(order, vector, held)
        return True

    def decline(self, order: CopyOrder, columns: list[Numbers], status: CopyStatus) -> bool:
        vector = Vector.of(columns[0], columns[1])
        self._drop_bytes(vector)
        return self._expect(vector, lambda: self.answer(order, status))

    def _take_bytes(self, order: CopyOrder, vector: Vector, held: Revocable) -> bool:
        with held.lock:
            if not held.revoked:
                if self.channel.fill_vector(vector) == 0:
                    raise ConnectionResetError("closed by the peer")
                return not vector.left and self.answer(order, CopyStatus.OK)
        self._drop_bytes(vector)
        return self._expect(vector, lambda: self.answer(order, CopyStatus.NO_GRANT))

    def _drop_bytes(self, vector: Vector) -> None:
        vector.divert(_scratch.ctypes.data, first=0)
