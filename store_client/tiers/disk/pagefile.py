"""The file that holds the pages, in granules of 4 KiB, the first of which says whose it is.

It is read and written past the page cache where the file system can: straight from and into the pool's arena. What is
not aligned as that asks for goes through a buffer: the last part of a page whose size is no multiple of 4 KiB, or a
page whose memory begins anywhere.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from store_client.base import Bytes
from store_client.embedded.allocator import Piece
from store_client.embedded.arena import spread
from store_client.embedded.locks import open_file
from store_client.tiers.base import Pieces

GRANULE = 4096
_HEADER = struct.Struct("<8sII16s")
_MAGIC = b"mckvdisk"
_VERSION = 1
_RESERVE = 0.05
"""Of the file system: left free for others, and for the case that it is the wrong one, with nothing mounted."""

Extents = Sequence[Piece]
_Move = Callable[[int, list[Any], int], int]


class Locked(Exception):
    """Another process has the file."""


def granules_of(nbytes: int) -> int:
    return -(-nbytes // GRANULE)


def aligned(nbytes: int) -> Bytes:
    """Memory that begins at a multiple of 4 KiB."""
    memory: Bytes = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    return memory


class PageFile:
    """The file, locked (flock) while it is open: the lock cannot be deleted without what it guards.

    Raises Locked; OSError.
    """

    def __init__(self, path: Path, *, direct: bool) -> None:
        self._path = path
        self._fd = open_file(path, os.O_RDWR | os.O_CREAT)
        self._io = -1
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Locked from None
            self.id = self._identify()
            self._own = os.fstat(self._fd)
            self._io = self._fd
            self.direct = direct and self._go_direct()
        except BaseException:
            self.close()
            raise
        self._buffers = threading.local()

    @staticmethod
    def is_one(path: Path) -> bool:
        """Whether this is such a file, or one that was only begun. Raises OSError."""
        fd = open_file(path, os.O_RDONLY)
        try:
            begin, size = os.pread(fd, GRANULE, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)
        return begin.startswith(_MAGIC) or (size <= GRANULE and not any(begin))

    def _identify(self) -> bytes:
        """Drawn when the file is made; a file that was only begun is made now."""
        magic, version, _, drawn = _HEADER.unpack(os.pread(self._fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        if magic == _MAGIC and version == _VERSION:
            return bytes(drawn)
        drawn = os.urandom(16)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, _HEADER.pack(_MAGIC, _VERSION, 0, drawn).ljust(GRANULE, b"\0"), 0)
        os.fsync(self._fd)
        return drawn

    def _go_direct(self) -> bool:
        """Whether the file system reads and writes past its cache, aligned to 4 KiB."""
        try:
            io = open_file(self._path, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return False
        try:
            os.preadv(io, [aligned(GRANULE).data], 0)
        except OSError:
            os.close(io)
            return False
        self._io = io
        return True

    @property
    def granules(self) -> int:
        """Of the file as it is now."""
        return os.fstat(self._fd).st_size // GRANULE

    @property
    def room(self) -> int:
        """Granules by which the file may grow so that 5 % of its file system stay free. Raises OSError."""
        seen = os.fstatvfs(self._fd)
        if not seen.f_blocks:  # some that are no disks do not tell
            return sys.maxsize
        return max(0, seen.f_bavail - int(seen.f_blocks * _RESERVE)) * seen.f_frsize // GRANULE

    def grow(self, start: int, stop: int) -> None:
        """Make the file hold granules `start .. stop`. Raises OSError (ENOSPC)."""
        os.posix_fallocate(self._fd, start * GRANULE, (stop - start) * GRANULE)

    def cut(self, granules: int) -> None:
        os.ftruncate(self._fd, granules * GRANULE)

    def is_in_place(self) -> bool:
        """False where the file was deleted or replaced. Raises OSError where nobody can tell."""
        try:
            return os.path.samestat(os.stat(self._path), self._own)
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def read(self, extents: Extents, pieces: Pieces) -> None:
        """Fill the pieces with what lies there."""
        if not _fit(pieces):
            whole = self._buffer(pieces)
            self._move(os.preadv, extents, [whole])
            spread(whole, pieces)
            return
        views, last, rest = self._with_tail(pieces)
        self._move(os.preadv, extents, views)
        if rest:
            last[-rest:] = views[-1][:rest]

    def write(self, extents: Extents, pieces: Pieces) -> None:
        """Put the bytes of the pieces there; they are on the disk after `sync`."""
        if not _fit(pieces):
            whole = self._buffer(pieces)
            np.concatenate(pieces, out=whole[: sum(map(len, pieces))])
            self._move(os.pwritev, extents, [whole])
            return
        views, last, rest = self._with_tail(pieces)
        if rest:
            views[-1][:rest] = last[-rest:]
        self._move(os.pwritev, extents, views)

    def _with_tail(self, pieces: Pieces) -> tuple[list[Bytes], Bytes, int]:
        """The pieces in whole granules, the last of them in a buffer where it holds `rest` bytes only."""
        last = pieces[-1]
        rest = len(last) % GRANULE
        views = list(pieces)
        if rest:
            views[-1:] = [last[:-rest], self._tail()] if len(last) > rest else [self._tail()]
        return views, last, rest

    def _tail(self) -> Bytes:
        if not hasattr(self._buffers, "tail"):
            self._buffers.tail = aligned(GRANULE)
        tail: Bytes = self._buffers.tail
        return tail

    @staticmethod
    def _buffer(pieces: Pieces) -> Bytes:
        return aligned(granules_of(sum(map(len, pieces))) * GRANULE)

    def _move(self, call: _Move, extents: Extents, views: list[Bytes]) -> None:
        for (first, granules), part in zip(extents, _parts(views, extents), strict=True):
            offset, left = first * GRANULE, granules * GRANULE
            while left:
                moved = call(self._io, part, offset)
                if moved <= 0:
                    raise OSError(errno.EIO, "the file ends too early", os.fspath(self._path))
                offset, left = offset + moved, left - moved
                if left:
                    part = list(_after(part, moved))

    def close(self) -> None:
        for fd in {self._io, self._fd}:
            if fd >= 0:
                os.close(fd)
        self._io = self._fd = -1


def _address(view: Bytes) -> int:
    address: int = view.__array_interface__["data"][0]
    return address


def _fit(pieces: Pieces) -> bool:
    """Whether all begin at a multiple of 4 KiB, and all but the last end at one."""
    aligned = not any(_address(piece) % GRANULE for piece in pieces)
    return aligned and not any(len(piece) % GRANULE for piece in pieces[:-1])


def _parts(views: list[Bytes], extents: Extents) -> Iterator[list[Bytes]]:
    """The views that belong to each extent, cut where one ends."""
    if len(extents) == 1:
        yield views
        return
    rest = views
    for _, granules in extents:
        size = granules * GRANULE
        yield list(_before(rest, size))
        rest = list(_after(rest, size))


def _before(views: Sequence[Bytes], nbytes: int) -> Iterator[Bytes]:
    for view in views:
        if nbytes <= 0:
            return
        yield view[:nbytes]
        nbytes -= len(view)


def _after(views: Sequence[Bytes], nbytes: int) -> Iterator[Bytes]:
    for view in views:
        if nbytes < len(view):
            yield view[max(0, nbytes) :]
        nbytes -= len(view)
