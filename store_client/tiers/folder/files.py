"""One file a page: read so that nobody's memory is written to after he has left, published at once or not at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from store_client.base import Put
from store_client.tiers.base import SEAL_NBYTES, Pieces, Sealed
from store_client.tiers.folder.layout import new_name, open_folder, opened

_CHUNK_NBYTES = 512 << 10
"""What the page cache does not have is read into a buffer that stays in the processor's cache, and copied from there:
nobody knows how long the mount takes, and it would write into memory that is others' by then."""
_NOT_AT_HAND = (errno.EAGAIN, errno.EOPNOTSUPP)
"""Not in the page cache; or a file system that does not say, as most network ones."""
GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
"""The page was removed, perhaps by another host while it was being read."""
_NO_FILE = (errno.ESPIPE, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""A pipe, a folder, a link or a socket lies where a page should: nothing that we wrote."""
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}
_ATTEMPTS = 3
"""At making a folder that others remove because it is empty."""
_buffers = threading.local()


class Ticket:
    """One operation of a call, that the caller may leave behind: a mount that hangs holds its threads for ever."""

    __slots__ = ("_left", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = False

    def leave(self) -> None:
        """From now on the operation touches nothing of the caller's and publishes nothing."""
        with self._lock:
            self._left = True

    def read_at_hand(self, fd: int, views: Sequence[memoryview], offset: int) -> int | None:
        """Read what the page cache has straight to where it belongs; None where it has nothing, or does not say."""
        with self._lock:
            self._check()
            try:
                return os.preadv(fd, views, offset, os.RWF_NOWAIT)
            except OSError as error:
                if error.errno not in _NOT_AT_HAND:
                    raise
                return None

    def copy(self, targets: Sequence[memoryview], source: memoryview) -> None:
        with self._lock:
            self._check()
            for target in targets:  # with the interpreter lock: that is sooner done than given away
                some = source[: len(target)]
                target[: len(some)] = some
                source = source[len(some) :]

    def publish(self, fd: int, new: str, page: str) -> Put:
        """`fd` is the folder's."""
        with self._lock:
            self._check()
        return _publish(fd, new, page)

    def _check(self) -> None:
        if self._left:
            raise TimeoutError("nobody waits for it")


def has_page(path: str, nbytes: int, stale_before: float = 0.0) -> bool:
    """Raises OSError where nobody can tell.

    A page that was last used before `stale_before` (the file server's seconds) is marked as used now.
    """
    try:
        info = os.lstat(path)
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    if not stat.S_ISREG(info.st_mode) or info.st_size != nbytes + SEAL_NBYTES:
        return False
    if info.st_mtime < stale_before:
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)
    return True


def remove_page(path: str) -> bool:
    """Raises OSError."""
    folder, _, name = path.rpartition("/")
    try:
        with opened(folder) as fd:
            os.unlink(name, dir_fd=fd)
    except OSError as error:
        if error.errno in GONE or error.errno in _NO_FILE:
            return False
        raise
    return True


def read_page(path: str, pieces: Pieces, ticket: Ticket) -> bytes | None:
    """Fill the pieces; the seal, or None where there is no such page, or it is shorter. Raises OSError.

    A longer file may be taken for the page that it begins with, if it has the seal of that.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would block
        try:
            return _fill(fd, pieces, ticket)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in GONE or error.errno in _NO_FILE:
            return None
        raise


def _fill(fd: int, pieces: Pieces, ticket: Ticket) -> bytes | None:
    """As few calls as can be: each gives the interpreter lock away, and may wait to have it back."""
    behind = np.empty(SEAL_NBYTES + 1, dtype=np.uint8)
    views = [*(piece.data for piece in pieces), behind.data]
    left = sum(map(len, views))
    offset, at_hand = 0, True
    while left > 1:
        got = ticket.read_at_hand(fd, views, offset) if at_hand else None
        at_hand = got is not None
        got = got or _read_by_way(fd, views, offset, ticket)
        if not got:
            break
        offset, left = offset + got, left - got
        _skip(views, got)
    return behind[:SEAL_NBYTES].tobytes() if left == 1 else None


def _read_by_way(fd: int, views: Sequence[memoryview], offset: int, ticket: Ticket) -> int:
    """Read some bytes, however long the mount takes for them."""
    if not hasattr(_buffers, "chunk"):
        _buffers.chunk = memoryview(bytearray(_CHUNK_NBYTES))
    chunk: memoryview = _buffers.chunk
    got = os.preadv(fd, [chunk[: sum(map(len, views))]], offset)
    ticket.copy(views, chunk[:got])
    return got


def _skip(views: list[memoryview], nbytes: int) -> None:
    """Drop so many bytes from the front."""
    while views and nbytes >= len(views[0]):
        nbytes -= len(views.pop(0))
    if nbytes:
        views[0] = views[0][nbytes:]


def write_page(path: str, page: Sealed, ticket: Ticket) -> Put:
    """Publish the page, or leave the one that is there; FAILED where another host cleared the folder meanwhile, or a
    folder lies where the page should.

    Raises OSError.
    """
    try:
        return _write_page(path, page, ticket)
    except OSError as error:
        if error.errno in GONE or error.errno in _NO_FILE:
            return Put.FAILED
        raise


def _write_page(path: str, page: Sealed, ticket: Ticket) -> Put:
    if has_page(path, sum(map(len, page.pieces))):
        return Put.PRESENT
    folder, _, name = path.rpartition("/")
    new = new_name(name)
    fd, file = _create(folder, new)
    try:
        try:
            _write_all(file, [*(piece.data for piece in page.pieces), memoryview(page.seal)])
            os.fsync(file)  # before it has its name, so that a crash of the file server leaves a whole page or none
        finally:
            os.close(file)
        return ticket.publish(fd, new, name)
    finally:
        with suppress(OSError):
            os.unlink(new, dir_fd=fd)
        os.close(fd)


def _create(folder: str, new: str) -> tuple[int, int]:
    """The folder, and the new file in it, both open."""
    with suppress(FileNotFoundError):
        return _create_in(open_folder(folder), new)
    for _ in range(_ATTEMPTS):
        with suppress(FileNotFoundError):
            return _create_in(open_folder(folder, make=True), new)
    return _create_in(open_folder(folder, make=True), new)


def _create_in(fd: int, new: str) -> tuple[int, int]:
    try:
        return fd, os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
    except BaseException:
        os.close(fd)
        raise


def _write_all(fd: int, views: list[memoryview]) -> None:
    offset = 0
    while views:
        offset += (written := os.pwritev(fd, views, offset))
        _skip(views, written)


def _publish(fd: int, new: str, page: str) -> Put:
    """By a link, since FUSE may lose sight of a page for a moment that is replaced by a rename."""
    try:
        os.link(new, page, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    except FileExistsError:
        mine = os.stat(new, dir_fd=fd, follow_symlinks=False)
        if mine.st_nlink > 1:  # over NFS an answer may be lost, and the repetition finds what it has made itself
            return Put.STORED
        there = os.stat(page, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISREG(there.st_mode) and there.st_size == mine.st_size:
            return Put.PRESENT
        os.rename(new, page, src_dir_fd=fd, dst_dir_fd=fd)  # that was half a page, or none of ours
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        os.rename(new, page, src_dir_fd=fd, dst_dir_fd=fd)  # whoever was there first holds the same page
    return Put.STORED
