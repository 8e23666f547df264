"""Locks that the kernel drops with the process, and waits that end.

Liveness is never a PID: processes of one pool may live in containers whose PID namespaces differ.
"""

import errno
import fcntl
import mmap
import os
import re
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

from mooncake_connector.errors import PoolError
from store_client.embedded.files import open_file, read_file
from store_client.embedded.rows import U64
from store_client.embedded.whoami import introduce

_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.002
_NAME = re.compile(r"[0-9a-f]{32}")
_COUNTS_AT, _COUNTS_NBYTES = 4096, 4096
"""What a process writes about itself comes before."""


class LockTimeout(Exception):
    """The lock was not free before the deadline."""


class FileLock:
    """An exclusive lock between processes (flock on `path`) and between the threads of this one.

    The file is one that the lock guards, so that nobody can delete the lock and leave what it guards. With `create` it
    is a file of its own, which is made again if it was deleted.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self._path, self._create = path, create
        self._fd = self._open()
        self._threads = threading.Lock()

    def _open(self) -> int:
        return open_file(self._path, os.O_RDWR | (os.O_CREAT if self._create else 0))

    def acquire(self, deadline: float) -> None:
        """Take the lock, or raise LockTimeout once `time.monotonic()` passes `deadline`."""
        if not self._threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LockTimeout
        try:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the pool is closed")
            _poll_flock(self._fd, deadline)
            while self._create and not self._is_at_path():
                stale, self._fd = self._fd, self._open()
                os.close(stale)
                _poll_flock(self._fd, deadline)
        except BaseException:
            self._threads.release()
            raise

    def _is_at_path(self) -> bool:
        """False where the file was deleted: whoever comes next would lock another one."""
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._fd), there)

    def release(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon_in_child(self) -> None:
        """After a fork: close the file without unlocking it, which would unlock it for the parent as well."""
        self.close()
        self._threads = threading.Lock()


def _poll_flock(fd: int, deadline: float) -> None:
    pause = _FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        left = deadline - time.monotonic()
        if left <= 0:
            raise LockTimeout
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)


def _map_counts(path: Path) -> U64:
    """Not by the locked descriptor: a mapping keeps a copy, and in a forked child the lock of a parent that is dead."""
    fd = open_file(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(fd, _COUNTS_NBYTES, offset=_COUNTS_AT), dtype="<u8")
    finally:
        os.close(fd)


class Owners:
    """One locked file per process that has the pool open; while the lock is held, the process lives.

    `Owners(folder)` registers this process. Call it, and `dead`, only under the pool's open lock: between the
    creation of a file and its lock nobody may take its owner for dead.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = uuid.uuid4().bytes
        self._path = folder / self.id.hex()
        self._changing = threading.Lock()
        self._fd, self.page = self._make(self._path)

    def _make(self, path: Path) -> tuple[int, U64]:
        """A locked file that says who this is, and the counts in it, mapped: see `whoami` and `counters`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PoolError(
                    f"pool folder {self._folder} has no flock ({error}): set `pool` to another one"
                ) from None
            introduce(fd)
            try:
                os.posix_fallocate(fd, _COUNTS_AT, _COUNTS_NBYTES)
            except OSError:  # full: a pool is read all the same, and the counts reach it with a put
                return fd, np.zeros(_COUNTS_NBYTES // 8, dtype=np.uint64)
            return fd, _map_counts(path)
        except BaseException:
            os.close(fd)
            raise

    def restore(self) -> bool:
        """Make this process's file again if it was deleted, its folder too; True if so. Raises OSError."""
        with self._changing:
            if self._fd < 0 or self._path.exists():
                return False
            self._folder.mkdir(mode=0o700, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.unlink(missing_ok=True)
            fd, page = self._make(new)
            try:
                os.replace(new, self._path)  # with its lock: nobody takes the owner for dead
            except BaseException:
                os.close(fd)
                raise
            os.close(self._fd)
            self._fd, self.page = fd, page
            return True

    def counts(self, owner: bytes | None = None) -> U64:
        """What this owner has counted and not handed over yet; without one, all owners together."""
        total: U64 = np.zeros(_COUNTS_NBYTES // 8, dtype=np.uint64)
        for name in [owner.hex()] if owner is not None else os.listdir(self._folder):
            try:
                content = read_file(self._folder / name, _COUNTS_AT)[:_COUNTS_NBYTES]
            except OSError:
                continue
            total += np.frombuffer(content.ljust(_COUNTS_NBYTES, b"\0"), dtype="<u8")
        return total

    def is_dead(self, owner: bytes) -> bool:
        """True if no process holds the lock of `owner` any more: a file that is gone proves nothing."""
        if owner == self.id:
            return False
        try:
            fd = os.open(self._folder / owner.hex(), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(fd)

    def forget(self, owner: bytes) -> None:
        (self._folder / owner.hex()).unlink(missing_ok=True)

    def dead(self) -> list[bytes]:
        """Owners whose file is there and whose lock is free."""
        names = [name for name in os.listdir(self._folder) if _NAME.fullmatch(name)]
        return [owner for owner in map(bytes.fromhex, names) if self.is_dead(owner)]

    def leave(self) -> None:
        """Unregister: to be called with no reservation left."""
        with self._changing:
            if self._fd >= 0:
                with suppress(OSError):  # one that stays has lost its lock: others find its owner dead
                    self._path.unlink(missing_ok=True)
                self._close()

    def abandon(self) -> None:
        """Close the file and leave it where it is, for others to find its owner dead."""
        with self._changing:
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon_in_child(self) -> None:
        """After a fork: close the file without unlocking it; the parent goes on owning it."""
        self._changing = threading.Lock()
        self._close()
