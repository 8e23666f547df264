"""The feed: a ring of the last pages stored and gone, in a mapped file. Followers read it without a lock.

The holder of the write lock lays the entries of a change behind the ring's head before it commits the change, and moves
the head once the page table shows it. A writer killed before its commit leaves entries that the next one overwrites;
one killed after it leaves them for the next writer to publish. So a follower hears of each change that happened, of
no other, and, if it falls more than a ring behind, of a gap.
"""

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mooncake_connector.kv.keys import KEY_NBYTES
from store_client.base import Position
from store_client.embedded.faults import Damaged
from store_client.embedded.locks import open_file
from store_client.embedded.names import U8, U64
from store_client.embedded.row import ROW_DTYPE

_HEADER_NBYTES = 4096
_HEAD, _TOLD, _WRITING, _READY, _READY_TO = range(5)
"""Entries published and the record of the last one; where a writer may be writing; what lies ready of which record."""

ENTRY_DTYPE = np.dtype(
    [
        ("key", "u1", KEY_NBYTES),
        ("space", "<u8"),
        ("sequence", "<u8"),
        ("nbytes", "<u4"),
        ("stored", "<u4"),
        ("check", "<u8"),
    ]
)
_CAPACITY = 1 << 15
"""Entries: a second of 16,000 pages stored and as many evicted. No transaction changes more than 4,096 pages."""
FEED_NBYTES = _HEADER_NBYTES + _CAPACITY * ENTRY_DTYPE.itemsize
Entries = npt.NDArray[np.void]
"""Of ENTRY_DTYPE."""

_MIX = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD,
     0x27D4EB2F165667C5, 0xC4CEB9FE1A85EC53], dtype=np.uint64,
)  # fmt: skip


def _checks(entries: Entries) -> U64:
    """A word for each entry that tells one that is torn or damaged."""
    words = entries.view("<u8").reshape(len(entries), 8)[:, :7]
    mixed: U64 = ((words + np.uint64(1)) * _MIX).sum(axis=1, dtype=np.uint64)
    return mixed ^ (mixed >> np.uint64(32))


class Feed:
    """The ring in the file `path`. `ring` is this file's alone: a position in another one is a gap."""

    def __init__(self, path: Path, ring: int) -> None:
        fd = open_file(path, os.O_RDWR)
        try:
            mapped = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._ring = ring
        self._header = np.frombuffer(mapped, dtype="<u8", count=_HEADER_NBYTES // 8)
        self._words = self._header.data
        self._entries: Entries = np.frombuffer(mapped, dtype=ENTRY_DTYPE, offset=_HEADER_NBYTES)
        self._capacity = len(self._entries)

    # For the holder of the write lock

    @property
    def told(self) -> int:
        """Number of the last redo record whose changes were published."""
        return int(self._header[_TOLD])

    def prepare(self, number: int, gone: U8, stored: U8) -> None:
        """Lay ready the changes of redo record `number`, as rows of the page table: pages gone, pages stored."""
        head, count = self._end(), len(gone) + len(stored)
        self._header[_WRITING] = head + count
        rows = np.concatenate([gone, stored]).reshape(-1).view(ROW_DTYPE)
        entries = np.empty(count, dtype=ENTRY_DTYPE)
        for name in ("key", "space", "nbytes"):
            entries[name] = rows[name]
        entries["stored"][: len(gone)] = 0
        entries["stored"][len(gone) :] = 1
        entries["sequence"] = np.arange(head, head + count)
        entries["check"] = _checks(entries)
        at = head % self._capacity
        first = self._capacity - at
        self._entries[at : at + count] = entries[:first]
        self._entries[: max(0, count - first)] = entries[first:]
        self._header[_READY] = number
        self._header[_READY_TO] = head + count

    def _end(self) -> int:
        """Where the ring ends. Raises Damaged where its header and its last entry do not agree on that."""
        head, told, _, ready, ready_to = self._header[:5].tolist()
        last = int(self._entries[(head - 1) % self._capacity]["sequence"])
        if (head and last != head - 1) or (ready == told and ready_to != head):
            raise Damaged(f"its feed ends at {head}, its last entry is {last}, and what was told went up to {ready_to}")
        return head

    def publish(self, number: int) -> None:
        """Tell of redo record `number`, which is committed and applied; telling again changes nothing."""
        if self._header[_READY] != number:
            raise Damaged(f"its feed has change {self._header[_READY]} ready, its ledger is at {number}")
        self._header[_HEAD] = self._header[_READY_TO]
        self._header[_TOLD] = number

    # For anybody

    def position(self) -> Position:
        """Where the ring ends now."""
        return self._ring, self._words[_HEAD]

    def read(self, since: Position | None, limit: int) -> tuple[Entries | None, Position]:
        """Up to `limit` entries from `since` on and where they end; None for a gap, and where the ring ends now."""
        head = int(self._header[_HEAD])
        ring, at = (0, 0) if since is None else since
        if ring != self._ring or not max(0, head - self._capacity) <= at <= head:
            return None, (self._ring, head)
        if at == head:
            return self._entries[:0], (ring, at)
        expected = np.arange(at, min(head, at + limit), dtype=np.uint64)
        entries = self._entries[(expected % np.uint64(self._capacity)).astype(np.int64)]
        overtaken = int(self._header[_WRITING]) - at > self._capacity
        if overtaken or (entries["sequence"] != expected).any() or (entries["check"] != _checks(entries)).any():
            return None, (self._ring, int(self._header[_HEAD]))
        return entries, (self._ring, at + len(expected))
