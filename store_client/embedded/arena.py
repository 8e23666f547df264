"""The arena: one mapped file that holds the bytes of all pages, in granules of 4 KiB.

Its space is secured with fallocate before anything is written: a store through a mapping into a full file system
kills the process. The file never shrinks while it may be mapped; what a smaller capacity frees is punched out.
"""

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from store_client.base import Bytes
from store_client.embedded.faults import start_thread
from store_client.embedded.locked_memory import LockedMemory
from store_client.embedded.locks import open_file
from store_client.embedded.memory_limit import is_in_memory
from store_client.embedded.securing import Securing, fallocate
from store_client.memory_locks import MemoryLocks

GRANULE = 4096
GROWTH_NBYTES = 64 << 20
_REGION_NBYTES = 4 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_KEEP_LOCK_NBYTES = 64 << 10
"""Smaller copies keep the interpreter lock: taking it back beside a busy thread can cost milliseconds, many times the
copy."""

_UNLOCK_WAIT_S = 10.0

Extents = Sequence[tuple[int, int]]
"""(first granule, granules), in the order of the page's bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """The arena file, mapped. Views stay valid after `close`; the mapping goes with the last of them."""

    def __init__(self, path: Path) -> None:
        self._fd = self._presence = -1
        self._lock = threading.Lock()
        self.limit = 0
        """Granules of the pool's capacity: beyond it nothing is mapped ahead, which would take memory."""
        self._data: Bytes = np.zeros(0, dtype=np.uint8)
        self._warm: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._locked: list[LockedMemory] = []
        self._securing = Securing(-1)
        try:
            self._fd = open_file(path, os.O_RDWR)
            self._securing = Securing(self._fd)
            # Locked while this process uses the file: see `punch_from`. Not the mapping's own, which outlives `close`.
            self._presence = open_file(path, os.O_RDWR)
            fcntl.flock(self._presence, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._map()
        except BaseException:
            self.close()
            raise

    @property
    def granules(self) -> int:
        """Of the file as it is now."""
        return os.fstat(self._fd).st_size // GRANULE

    def size(self) -> tuple[int, int]:
        """Of the file, in bytes, and of what the file system gave it: changes whenever more is secured."""
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_blocks

    @property
    def secured_nbytes(self) -> int:
        """That the file system has given the file."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def is_in_memory(self) -> bool:
        """Whether the file is in shared memory. Elsewhere the kernel writes its pages to a disk, and pages that a
        device writes behind its back are not for that."""
        return is_in_memory(self._fd)

    def lock_memory(self, locks: MemoryLocks, secured: Callable[[], int | None]) -> None:
        """Keep what is secured page-locked until `close`; see `LockedMemory`."""
        self._locked.append(LockedMemory(self, os.dup(self._presence), locks, secured, GRANULE))

    @property
    def memory(self) -> Bytes:
        """All of it as mapped now; a later mapping is another one, and this one stays as long as it is referred to."""
        with self._lock:
            self._map()
            return self._data

    def _map(self) -> None:
        size = os.fstat(self._fd).st_size
        if size <= len(self._data):
            return
        mapping = mmap.mmap(self._fd, size)
        data: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        _libc.madvise(data.ctypes.data, size, _MADV_HUGEPAGE)
        self._address = data.ctypes.data
        self._warm = np.zeros(-(-size // _REGION_NBYTES), dtype=np.bool_)
        self._data = data

    def view(self, first: int, nbytes: int) -> Bytes | None:
        """`nbytes` of the arena from granule `first` on, or None where the file has no such place."""
        start = first * GRANULE
        stop = start + nbytes
        if stop > len(self._data):
            with self._lock:
                self._map()
            if stop > len(self._data):
                return None
        lowest, highest = start // _REGION_NBYTES, (stop - 1) // _REGION_NBYTES
        if not self._warm[lowest] or not self._warm[highest]:
            self._populate(lowest, highest + 1)
        return self._data[start:stop]

    def _populate(self, first: int, stop: int) -> None:
        """Map regions at once instead of fault by fault; a kernel that cannot (before 5.14) faults as ever."""
        with self._lock:  # what is punched out, or closed to be punched out by others, must not come back
            size = min(len(self._data), self.limit * GRANULE) if self._fd >= 0 else 0
            for region in range(first, min(stop, len(self._warm))):
                if not self._warm[region]:
                    start = region * _REGION_NBYTES
                    if start < size:
                        _libc.madvise(self._address + start, min(_REGION_NBYTES, size - start), _MADV_POPULATE_READ)
                    self._warm[region] = True

    def _map_ahead(self, start: int, stop: int) -> None:
        """What was just secured between these bytes, region by region: who needs one of them waits for that alone."""
        for region in range(-(-start // _REGION_NBYTES), stop // _REGION_NBYTES):
            self._populate(region, region + 1)

    def warm_up(self, granules: int) -> None:
        """Map the first `granules` in a background thread, as far as the file holds them: first reads are fast then."""
        regions = min(granules * GRANULE, self.secured_nbytes) // _REGION_NBYTES
        if regions:
            start_thread("warm-up", self._warm_up, regions)

    def _warm_up(self, regions: int) -> None:
        for region in range(regions):
            if self._fd < 0:
                return
            self._populate(region, region + 1)

    def views(self, extents: Extents, nbytes: int) -> list[Bytes] | None:
        """The pieces of a page, together `nbytes` long; None if the extents are not in the arena or too short."""
        pieces: list[Bytes] = []
        left = nbytes
        for first, granules in extents:
            size = min(left, granules * GRANULE)
            if size <= 0:
                break
            piece = self.view(first, size)
            if piece is None:
                return None
            pieces.append(piece)
            left -= size
        return pieces if left == 0 else None

    def secure(self, start: int, stop: int) -> None:
        """Make the file hold granules `start .. stop`, and soon some of those behind them, within the limit. Raises
        OSError (ENOSPC) if the file system cannot, or a memory limit does not allow it."""
        self._securing.secure(start * GRANULE, stop * GRANULE, self.limit * GRANULE, self._map_ahead)

    def punch_from(self, first: int) -> None:
        """Give everything from this granule on back to the file system, unless another process uses the file.

        One that reads there needs the space anew, and is killed where the file system is full (SIGBUS).
        """
        size = os.fstat(self._fd).st_size - first * GRANULE
        if size <= 0:
            return
        with self._alone() as alone:
            if alone:
                with self._lock:
                    fallocate(self._fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, first * GRANULE, size)

    def is_alone(self) -> bool:
        """True if no other process uses the file; only under the open lock."""
        with self._alone() as alone:
            return alone

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        try:
            yield alone
        finally:
            fcntl.flock(self._presence, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def extend(self, granules: int) -> None:
        """Make the file at least so large, without securing the new part."""
        if os.fstat(self._fd).st_size < granules * GRANULE:
            os.ftruncate(self._fd, granules * GRANULE)

    def abandon_in_child(self) -> None:
        """After a fork: a thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._securing.abandon_in_child()
        for locked in self._locked:
            locked.abandon_in_child()
        self._close_files()

    def close(self) -> None:
        for locked in self._locked:
            locked.end(_UNLOCK_WAIT_S)
        self._locked.clear()
        self._close_files()

    def _close_files(self) -> None:
        self._securing.close()
        with self._lock:
            for fd in (self._fd, self._presence):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._presence = -1


def gather(pieces: Sequence[Bytes], nbytes: int) -> Bytes:
    """The pieces as one contiguous array: a private copy."""
    whole: Bytes = np.empty(nbytes, dtype=np.uint8)
    for part, piece in _beside(whole, pieces):
        _copy(part, piece)
    return whole


def spread(whole: Bytes, pieces: Sequence[Bytes]) -> None:
    """Copy the array into the pieces, one after the other."""
    for part, piece in _beside(whole, pieces):
        _copy(piece, part)


def _beside(whole: Bytes, pieces: Sequence[Bytes]) -> Iterator[tuple[Bytes, Bytes]]:
    at = 0
    for piece in pieces:
        yield whole[at : at + len(piece)], piece
        at += len(piece)


def _copy(target: Bytes, source: Bytes) -> None:
    if len(target) <= _KEEP_LOCK_NBYTES:
        target.data[:] = source.data
    else:
        np.copyto(target, source)
