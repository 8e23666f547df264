"""What a sender and a receiver say to each other after the handshake, whatever the transport.

The sender's orders are a header and then columns of int64, one number a piece: destinations, sizes, and (where the
receiver fetches the bytes itself) sources. The receiver answers each order with its number and a status. All numbers
are little endian, as are the machines this runs on.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transfer.base import GRANT_KEY_NBYTES, Int64, TransferError

MAX_ORDER_PIECES = 1 << 16
PROBE_KEY = bytes(GRANT_KEY_NBYTES)
"""In place of a grant's key: no order to write, but a question (see the transport)."""

_MAGIC = 0x544B434D  # "MCKT"
_HEADER = struct.Struct(f"<IIQ{GRANT_KEY_NBYTES}sQQ")
_ANSWER = struct.Struct("<QII")
HEADER_NBYTES = _HEADER.size
ANSWER_NBYTES = _ANSWER.size


class WireError(TransferError):
    """Bytes that no sender or receiver of ours sends; the connection ends."""


class Status(enum.IntEnum):
    """What the receiver made of an order."""

    OK = 0
    NO_GRANT = 1
    """The grant is unknown or revoked."""
    OUTSIDE = 2
    """A piece lies outside of the grant."""
    UNREADABLE = 3
    """The source cannot be read."""
    FORBIDDEN = 4
    """The receiver lacks the permission to read the sender's memory."""


@dataclass(frozen=True, slots=True)
class Order:
    """Header of an order: `pieces` copies of `nbytes` in all into memory granted under `key`."""

    number: int
    key: bytes
    pieces: int
    nbytes: int
    place: int = 0
    """Where in the ring the bytes are (shm), or what a probe expects."""

    def encode(self, *columns: Int64) -> npt.NDArray[np.uint8]:
        """Header and columns."""
        header = _HEADER.pack(_MAGIC, self.pieces, self.number, self.key, self.nbytes, self.place)
        return np.frombuffer(
            header + b"".join(column.astype("<i8", copy=False).tobytes() for column in columns), np.uint8
        )


def decode_order(data: bytes, max_nbytes: int) -> Order:
    """Raises WireError for anything that no sender sends."""
    if len(data) != HEADER_NBYTES:
        raise WireError(f"header of {len(data)} bytes: expected {HEADER_NBYTES}")
    magic, pieces, number, key, nbytes, place = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise WireError(f"header begins with {magic:#010x}: expected {_MAGIC:#010x}")
    if not (1 <= pieces <= MAX_ORDER_PIECES and pieces <= nbytes <= max_nbytes):
        raise WireError(
            f"order of {pieces} pieces and {nbytes} bytes: expected 1 to {MAX_ORDER_PIECES}, and at most {max_nbytes}"
        )
    return Order(number, key, pieces, nbytes, place)


def decode_columns(order: Order, data: npt.NDArray[np.uint8]) -> Int64:
    """Columns as rows of one array, the second being the sizes. Raises WireError where these are no sizes."""
    columns = data.view("<i8").reshape(-1, order.pieces)
    if order.pieces == 1:  # the same checks without numpy's cost, which a small transfer would feel
        address, *rest = (int(row[0]) for row in columns)
        if rest[0] != order.nbytes or min(address, *rest) < 0:
            raise WireError(f"a piece of {rest[0]} bytes at {address:#x} in an order of {order.nbytes}")
        return columns
    sizes = columns[1]
    # Each is checked before they are summed: 65,536 sizes of at most 2^47 cannot overflow.
    if sizes.min() < 1 or sizes.max() > order.nbytes or int(sizes.sum()) != order.nbytes:
        raise WireError(f"pieces of an order do not add up to its {order.nbytes} bytes")
    if columns.min() < 0:
        raise WireError(f"address {int(columns.min()):#x} in an order")
    return columns


def encode_answer(number: int, status: Status) -> bytes:
    return _ANSWER.pack(number, status, 0)


def decode_answer(data: bytes) -> tuple[int, Status]:
    """Raises WireError for anything that no receiver sends."""
    number, status, rest = _ANSWER.unpack(data)
    try:
        if rest == 0:
            return number, Status(status)
    except ValueError:
        pass
    raise WireError(f"answer with status {status}, {rest}")
