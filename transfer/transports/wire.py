"""What a sender and a receiver say to each other after the handshake, whatever the transport.

The sender's orders are a header and then columns of int64, one number a piece: destinations, sizes, and (where the
receiver fetches the bytes itself) sources, with what the fetcher has to know besides attached. Short ones are padded to
a block, which the receiver reads in one step, so that a small transfer costs it one system call less. The receiver
answers each order with its number and a status. All numbers are little endian, as are the machines this runs on.
"""

from __future__ import annotations

import enum
import itertools
import struct
from array import array

import msgspec
import numpy as np

from transfer.transports.base import FEW, GRANT_KEY_NBYTES, Numbers, TransferError

MAX_ORDER_PIECES = 1 << 16
PROBE_KEY = bytes(GRANT_KEY_NBYTES)
"""In place of a grant's key: no order to write, but a question (see the transport)."""

_MAGIC = 0x544B434D  # "MCKT"
_MARKED_MAGIC = 0x4D4B434D  # "MCKM"
_HEADER = struct.Struct(f"<IIQ{GRANT_KEY_NBYTES}sQQQ")
_ANSWER = struct.Struct("<QII")
HEADER_NBYTES = _HEADER.size
BLOCK_NBYTES = HEADER_NBYTES + 3 * 8 * FEW
"""An order has at least this size."""
ANSWER_NBYTES = _ANSWER.size


class WireError(TransferError):
    """Bytes that no sender or receiver of ours sends; the connection ends."""


class CopyStatus(enum.IntEnum):
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
    UNWRITABLE = 6
    """The device that has the granted memory failed."""
    BROKEN = 5
    """What the receiver reads through broke, not necessarily by this order; its transport says how that is mended."""


_STATUSES = {int(status): status for status in CopyStatus}


class CopyOrder(msgspec.Struct, frozen=True):
    """Header of an order: `pieces` copies of `nbytes` in all into memory granted under `key`."""

    number: int
    key: bytes
    pieces: int
    nbytes: int
    place: int = 0
    """Where in the ring the bytes are (shm), or what a probe expects."""
    attached: int = 0
    """Bytes after the columns."""
    is_marked: bool = False
    """Whether a mark follows them (see `transfer.transports.passing`)."""

    def encode(self, *columns: Numbers, attachment: bytes = b"", mark: bytes = b"") -> array[int]:
        """Bytes of header, columns, attachment and mark, and of what fills the block."""
        magic = _MARKED_MAGIC if mark else _MAGIC
        header = _HEADER.pack(magic, self.pieces, self.number, self.key, self.nbytes, self.place, len(attachment))
        if isinstance(columns[0], list):
            data = header + struct.pack(f"<{len(columns) * self.pieces}q", *itertools.chain(*columns))
        else:
            data = header + b"".join(np.asarray(column, "<i8").tobytes() for column in columns)
        return array("B", (data + attachment + mark).ljust(BLOCK_NBYTES, b"\0"))


def decode_order(block: bytes | array[int], max_nbytes: int, max_attached: int = 0) -> CopyOrder:
    """The header at the beginning of an order. Raises WireError for anything that no sender sends."""
    magic, pieces, number, key, nbytes, place, attached = _HEADER.unpack_from(block)
    if magic not in (_MAGIC, _MARKED_MAGIC):
        raise WireError(f"header begins with {magic:#010x}: expected {_MAGIC:#010x}")
    if not (1 <= pieces <= MAX_ORDER_PIECES and pieces <= nbytes <= max_nbytes):
        raise WireError(
            f"order of {pieces} pieces and {nbytes} bytes: expected 1 to {MAX_ORDER_PIECES}, and at most {max_nbytes}"
        )
    if attached > max_attached:
        raise WireError(f"{attached} bytes attached to an order: expected at most {max_attached}")
    return CopyOrder(number, key, pieces, nbytes, place, attached, magic == _MARKED_MAGIC)


def decode_columns(order: CopyOrder, data: bytes | array[int], count: int) -> list[Numbers]:
    """The `count` columns of the whole order `data`, the second being the sizes; they may share its memory.

    Raises WireError where these are no sizes.
    """
    pieces = order.pieces
    columns: list[Numbers]
    if pieces <= FEW:
        few = struct.unpack_from(f"<{count * pieces}q", data, HEADER_NBYTES)
        columns = [list(few[start : start + pieces]) for start in range(0, len(few), pieces)]
        fit, least = min(columns[1]) >= 1 and sum(columns[1]) == order.nbytes, min(few)
    else:
        many = np.frombuffer(data, "<i8", count * pieces, HEADER_NBYTES)
        columns = list(many.reshape(count, pieces))
        sizes = many[pieces : 2 * pieces]
        # Each is checked before they are summed: 65,536 sizes of at most 2^47 cannot overflow.
        fit, least = sizes.min() >= 1 and sizes.max() <= order.nbytes and sizes.sum() == order.nbytes, int(many.min())
    if not fit:
        raise WireError(f"pieces of an order do not add up to its {order.nbytes} bytes")
    if least < 0:
        raise WireError(f"address {least:#x} in an order")
    return columns


def encode_answer(number: int, status: CopyStatus) -> bytes:
    return _ANSWER.pack(number, status, 0)


def decode_answer(data: bytes, start: int = 0) -> tuple[int, CopyStatus]:
    """The answer at `start`. Raises WireError for anything that no receiver sends."""
    number, status, rest = _ANSWER.unpack_from(data, start)
    known = _STATUSES.get(status)
    if known is None or rest:
        raise WireError(f"answer with status {status}, {rest}")
    return number, known
