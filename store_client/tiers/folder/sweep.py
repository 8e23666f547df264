"""Takes out what is too old, too much, or was left behind. Any number of hosts may do so at once.

They need not agree on anything: all look at the same files and their times, so two that sweep at once choose the same
pages, and who comes second finds them gone. A sweep goes on where it stopped when its time was up.
"""

from __future__ import annotations

import os
import stat
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from store_client.embedded.locks import open_file
from store_client.tiers.base import Purged
from store_client.tiers.folder.clock import ServerClock
from store_client.tiers.folder.files import GONE
from store_client.tiers.folder.layout import SWEPT, is_clock, is_new, is_page, opened, page_folders, page_nbytes

EVERY_S = 600.0
"""Between sweeps, whichever host does them."""
LEFT_BEHIND_S = 3600.0
"""Older than this, a file that is being written is nobody's any more, and neither is an empty folder."""
_LOW_WATER = 0.9
"""Of the capacity: so full is a folder after a sweep that found more than its capacity."""
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and did."""

    pages: int
    nbytes: int
    """Of pages that stay."""
    removed: int


class Sweep:
    """One sweep, in steps: iterate over it; `result` is set when it is over.

    Args:
        capacity: bytes of pages; None for no bound.
        keep_s: pages that were stored and last used longer ago go; None for no bound.

    Raises OSError.
    """

    def __init__(self, root: Path, clock: ServerClock, capacity: int | None, keep_s: float | None) -> None:
        self._root, self._clock, self._capacity, self._keep_s = root, clock, capacity, keep_s
        self.result: Swept | None = None
        self._removed = 0

    def __iter__(self) -> Iterator[None]:
        now_s = self._clock.ask()
        stale_s = now_s - LEFT_BEHIND_S
        self._remove_clocks(stale_s)
        times, sizes = array("d"), array("q")
        for folder in page_folders(self._root):
            self._look_at(folder, now_s, stale_s, times, sizes)
            yield
        last_use, nbytes = np.array(times), np.array(sizes)
        gone = np.zeros(len(nbytes), dtype=np.bool_)
        if self._capacity is not None and nbytes.sum() > self._capacity:
            limit_s = _cutoff(last_use, nbytes, self._capacity)
            gone = last_use <= limit_s
            for folder in page_folders(self._root):
                self._remove_until(folder, limit_s)
                yield
        self.result = Swept(int((~gone).sum()), int(nbytes[~gone].sum()), self._removed)

    def _look_at(self, folder: str, now_s: float, stale_s: float, times: array[float], sizes: array[int]) -> None:
        empty = True
        for fd, name, info in _files(folder):
            empty = False
            if not stat.S_ISREG(info.st_mode):
                continue
            if is_page(name):
                if self._keep_s is not None and info.st_mtime < now_s - self._keep_s:
                    self._remove(fd, name)
                else:
                    times.append(info.st_mtime)
                    sizes.append(page_nbytes(info.st_size))
            elif is_new(name) and info.st_mtime < stale_s:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
        if empty:
            _remove_folder(folder, stale_s)

    def _remove_until(self, folder: str, limit_s: float) -> None:
        for fd, name, info in _files(folder):
            if is_page(name) and stat.S_ISREG(info.st_mode) and info.st_mtime <= limit_s:
                self._remove(fd, name)

    def _remove(self, fd: int, name: str) -> None:
        """A page that another host was faster with counts as its."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)
            self._removed += 1

    def _remove_clocks(self, stale_s: float) -> None:
        for entry in os.scandir(self._root):
            if is_clock(entry.name):
                with suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime < stale_s:
                        os.unlink(entry.path)


def is_due(root: Path, now_s: float) -> bool:
    """Whether nobody has begun a sweep for long."""
    try:
        return not now_s - EVERY_S < os.lstat(root / SWEPT).st_mtime <= now_s + EVERY_S
    except FileNotFoundError:
        return True


def say_begun(root: Path) -> None:
    fd = open_file(root / SWEPT, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"now")
        os.utime(fd)
    finally:
        os.close(fd)


def remove_all(
    root: Path, namespace: bytes | None, before_s: float | None = None, larger_than_nbytes: int | None = None
) -> Purged:
    """Remove the pages that all conditions given apply to: of one namespace, last used before a time of the file
    server, of more bytes. Raises OSError."""
    pages = nbytes = 0
    every = before_s is None and larger_than_nbytes is None
    for folder in page_folders(root, namespace):
        for fd, name, info in _files(folder):
            if not stat.S_ISREG(info.st_mode):
                continue
            size = page_nbytes(info.st_size)
            kept = (before_s is not None and info.st_mtime >= before_s) or (
                larger_than_nbytes is not None and size <= larger_than_nbytes
            )
            if (is_page(name) and not kept) or (is_new(name) and every):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
                    pages, nbytes = pages + is_page(name), nbytes + size * is_page(name)
        _remove_folder(folder, None)
    return Purged(pages, nbytes)


def _files(folder: str) -> Iterator[tuple[int, str, os.stat_result]]:
    """What is in a folder, as far as it does not vanish meanwhile, each with the folder's descriptor."""
    try:
        with opened(folder, to_list=True) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield fd, entry.name, entry.stat(follow_symlinks=False)
    except OSError as error:
        if error.errno not in GONE:
            raise


def _remove_folder(folder: str, stale_s: float | None) -> None:
    """If it is empty, and nobody has used it for long."""
    above, _, name = folder.rpartition("/")
    with suppress(OSError), opened(above) as fd:
        if stale_s is None or os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime < stale_s:
            os.rmdir(name, dir_fd=fd)


def _cutoff(last_use: np.ndarray, nbytes: np.ndarray, capacity: int) -> float:
    """The time up to which pages go, so that the rest fits well."""
    order = np.argsort(last_use, kind="stable")
    over = int(nbytes.sum()) - int(capacity * _LOW_WATER)
    last = int(np.searchsorted(np.cumsum(nbytes[order]), over))
    return float(last_use[order[min(last, len(order) - 1)]])
