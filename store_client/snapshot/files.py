"""The files that hold the pages of a snapshot: written in one go and in the background to disk, read anywhere."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from store_client.base import Pieces
from store_client.snapshot.folders import open_inside
from store_client.snapshot.form import pages_file

FILE_NBYTES = 1 << 30
_FLUSH_NBYTES = 64 << 20
_FLUSHES_AHEAD = 3
"""So many of these may wait for the disk: what a snapshot takes of the system's memory at most."""
_PIECES_AT_ONCE = 1024
_OPEN_FILES = 8

Piece = tuple[int, int]
"""(number of the file, offset in it)."""


class PagesWriter:
    """Appends pages to files of about FILE_NBYTES. Methods raise OSError; they may be called from several threads."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="mooncake-connector-flush")
        self._flushes: deque[Future[None]] = deque()
        self._fd = -1
        self._unflushed = 0
        self.sizes: list[int] = []
        """Of the files, in bytes."""

    def append(self, pages: Sequence[Pieces]) -> list[Piece]:
        """Write these pages, each in pieces; returns where each of them begins."""
        with self._lock:
            places = []
            for run in _runs(pages):
                nbytes = sum(len(piece) for page in run for piece in page)
                if self._fd < 0 or (self.sizes[-1] and self.sizes[-1] + nbytes > FILE_NBYTES):
                    self._next_file()
                at = self.sizes[-1]
                for page in run:
                    places.append((len(self.sizes) - 1, at))
                    at += sum(map(len, page))
                _write_all(self._fd, [piece.data for page in run for piece in page])
                self.sizes[-1] = at
                self._unflushed += nbytes
                if self._unflushed >= _FLUSH_NBYTES:
                    self._flush()
            return places

    def finish(self) -> None:
        """Have everything on the disk."""
        with self._lock:
            self._end_file()
            while self._flushes:
                self._flushes.popleft().result()

    def close(self) -> None:
        self._flusher.shutdown(wait=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _next_file(self) -> None:
        self._end_file()
        self._fd = open_inside(self._folder, pages_file(len(self.sizes)), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self.sizes.append(0)

    def _end_file(self) -> None:
        if self._fd >= 0:
            self._flush()
            os.close(self._fd)
            self._fd = -1

    def _flush(self) -> None:
        self._flushes.append(self._flusher.submit(_to_disk, os.dup(self._fd)))
        self._unflushed = 0
        while len(self._flushes) > _FLUSHES_AHEAD:
            self._flushes.popleft().result()


class PagesReader:
    """Reads pages from the files in a folder. Methods raise OSError; they may be called from several threads."""

    def __init__(self, folder: int, sizes: Sequence[int]) -> None:
        self._folder, self._sizes = folder, sizes
        self._lock = threading.Lock()
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, file: int, offset: int, pieces: Pieces) -> None:
        """Fill the pieces with what is at this place."""
        with self._lock:
            fd = os.dup(self._file(file))
        try:
            for piece in pieces:
                at = 0
                while at < len(piece):
                    count = os.preadv(fd, [piece[at:].data], offset + at)
                    if not count:
                        raise OSError(errno.EIO, "the file ends too early", pages_file(file))
                    at += count
                offset += len(piece)
        finally:
            os.close(fd)

    def advise(self, file: int, start: int, stop: int, *, wanted: bool) -> None:
        """Tell the system that these bytes are wanted soon, or never again: the pool has better use for the memory."""
        advice = os.POSIX_FADV_WILLNEED if wanted else os.POSIX_FADV_DONTNEED
        with self._lock, contextlib.suppress(OSError):  # whoever reads them meets it again
            os.posix_fadvise(self._file(file), start, stop - start, advice)

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()

    def _file(self, number: int) -> int:
        fd = self._files.get(number)
        if fd is None:
            fd = open_inside(self._folder, pages_file(number))
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[number] = fd
        self._files.move_to_end(number)
        return fd


def _runs(pages: Sequence[Pieces]) -> Iterator[list[Pieces]]:
    """Pages that are written with one call."""
    run: list[Pieces] = []
    pieces = 0
    for page in pages:
        if run and pieces + len(page) > _PIECES_AT_ONCE:
            yield run
            run, pieces = [], 0
        run.append(page)
        pieces += len(page)
    if run:
        yield run


def _write_all(fd: int, pieces: list[memoryview]) -> None:
    first = 0
    while first < len(pieces):
        written = os.writev(fd, pieces[first : first + _PIECES_AT_ONCE])
        while first < len(pieces) and written >= len(pieces[first]):
            written -= len(pieces[first])
            first += 1
        if written:
            pieces[first] = pieces[first][written:]


def _to_disk(fd: int) -> None:
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
