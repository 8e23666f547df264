"""Locks that the kernel drops with the process, and waits that end.

Liveness is never a PID: processes of one pool may live in containers whose PID namespaces differ.
"""

import errno
import fcntl
import os
import threading
import time
import uuid
from pathlib import Path

from mooncake_connector.errors import PoolError
from store_client.embedded.files import open_file
from store_client.embedded.whoami import introduce

_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.002


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


class Owners:
    """One locked file per process that has the pool open; while the lock is held, the process lives.

    `Owners(folder)` registers this process. Call it, and `sweep`, only under the pool's open lock: between the
    creation of a file and its lock nobody may take its owner for dead.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = uuid.uuid4().bytes
        self._path = folder / self.id.hex()
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise PoolError(f"pool folder {folder} has no flock ({error}): set `pool` to another one") from None
        introduce(self._fd)

    def is_dead(self, owner: bytes) -> bool:
        """True if no process holds the lock of `owner` any more."""
        if owner == self.id:
            return False
        try:
            fd = os.open(self._folder / owner.hex(), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
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

    def sweep(self, keep: set[bytes]) -> None:
        """Delete the files of dead owners, except of those in `keep` whose reservations still exist."""
        for entry in list(os.scandir(self._folder)):
            try:
                owner = bytes.fromhex(entry.name)
            except ValueError:
                continue  # not a file of ours
            if len(owner) == 16 and owner not in keep and self.is_dead(owner):
                self.forget(owner)

    def leave(self) -> None:
        """Unregister: to be called with no reservation left."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            self.abandon()

    def abandon(self) -> None:
        """Close the file without unlocking it: right in a forked child, whose parent goes on owning it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
