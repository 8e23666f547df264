"""Checksums that travel with the bytes, from one stage of page-locked memory to another, where both sides have devices.

A sender marks each order with the XXH3-64 of its bytes, which lie in a stage; the receiver compares that while they lie
in one of its own, and notes which pieces of which batch have come and were right. So it need not read them from the
device to know it. Orders come in any sequence, over any path: each is right or wrong by itself, and a batch is whole
where its orders, put in sequence, are the pieces that were expected, in their sequence.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import xxhash

from transfer.transports.base import Int64, Numbers

if TYPE_CHECKING:
    from transfer.transports.memory import Revocable
    from transfer.transports.vectors import Pieces

_MARK = struct.Struct("<QQQ")
MARK_NBYTES = _MARK.size
MAX_NOTED = 1 << 22
"""Pieces under one grant, of batches that nobody has asked for yet: what a peer may make this side keep. Nothing is
known of an order beyond that."""
_ORDER = 32
"""What the record of an order counts for besides its pieces."""

Marker: TypeAlias = "Callable[[Pieces], bytes]"
"""Marks an order of these pieces."""


class Mark(msgspec.Struct, frozen=True):
    """Of one order: the batch that it belongs to, where in the bytes of that its own begin, and their XXH3-64."""

    batch: int
    offset: int
    digest: int

    def encode(self) -> bytes:
        return _MARK.pack(self.batch, self.offset, self.digest)


def decode_mark(data: bytes) -> Mark:
    """All that has the length of one is one."""
    return Mark(*_MARK.unpack(data))


def marker(batch: int, start: int, offset: int) -> Marker:
    """Marks orders of what lies at `start`, in a stage, `offset` bytes after the beginning of the batch."""

    def mark(pieces: Pieces) -> bytes:
        here = int(pieces.local[0])
        bytes_there = (ctypes.c_char * pieces.total).from_address(here)
        return Mark(batch, offset + here - start, xxhash.xxh3_64_intdigest(bytes_there)).encode()

    return mark


class Passing:
    """A marked order at the receiver: its bytes are shown in their order, and it is noted what became of them."""

    def __init__(self, held: Revocable, peer: bytes, mark: Mark, addresses: Numbers, nbytes: Numbers) -> None:
        self._held, self._peer, self._mark = held, peer, mark
        self._pieces = np.array(addresses, dtype=np.int64), np.array(nbytes, dtype=np.int64)
        """Copies: an order's columns may lie where the next one is read to before this one is where it belongs."""
        self._digest = xxhash.xxh3_64()

    def see(self, part: memoryview) -> None:
        """The next bytes."""
        self._digest.update(part)

    def note(self) -> None:
        """All of it is where it belongs."""
        is_right = self._digest.intdigest() == self._mark.digest
        self._held.passed.note(self._peer, self._mark, self._pieces if is_right else None)


class Passed:
    """What has come under one grant, batch by batch of each peer. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[tuple[bytes, int], dict[int, tuple[Int64, Int64] | None]] = {}
        """By offset the addresses and sizes of each order's pieces, None where its bytes were wrong."""
        self._room = MAX_NOTED

    def note(self, peer: bytes, mark: Mark, pieces: tuple[Numbers, Numbers] | None) -> None:
        """An order has come: into these pieces, or with wrong bytes. Sent again, over another path, it counts once."""
        found = None if pieces is None else joined(*(np.asarray(column, dtype=np.int64) for column in pieces))
        batch, size = (peer, mark.batch), _size(found)
        with self._lock:
            orders = self._batches.get(batch, {})
            if mark.offset in orders:
                if found is None:
                    self._room += _size(orders[mark.offset]) - size
                    orders[mark.offset] = None
            elif size <= self._room:
                self._room -= size
                self._batches.setdefault(batch, orders)[mark.offset] = found

    def is_whole(self, peer: bytes, batch: int, addresses: Int64, nbytes: Int64) -> bool:
        """Whether the bytes of these pieces have come, in this order, and all of them right. Forgets the batch."""
        with self._lock:
            orders = self._batches.pop((peer, batch), {})
            self._room += sum(map(_size, orders.values()))
        end, parts = 0, []
        for offset, part in sorted(orders.items(), key=lambda order: order[0]):
            if part is None or offset != end:
                return False
            parts.append(part)
            end += int(part[1].sum())
        if not parts:
            return False
        came = joined(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        return all(map(np.array_equal, came, joined(addresses, nbytes)))


def _size(part: tuple[Int64, Int64] | None) -> int:
    return _ORDER + (0 if part is None else len(part[1]))


def joined(addresses: Int64, nbytes: Int64) -> tuple[Int64, Int64]:
    """The same bytes in the same order, as few pieces as there can be."""
    first = np.concatenate(([True], addresses[1:] != addresses[:-1] + nbytes[:-1]))
    return addresses[first], np.add.reduceat(nbytes, np.flatnonzero(first))
