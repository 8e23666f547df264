"""The files of a pool as processes share them: opened without a wait, and locked until the process ends or a deadline.

What should be a file of the pool is a regular file, or an error at once; never a link. A lock is one that the kernel
drops with its process.
"""

import errno
import fcntl
import os
import stat
import threading
import time
from pathlib import Path

_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.002
_SECURED_NBYTES = 8 << 20
"""At once: within some milliseconds."""


def open_file(path: Path, flags: int) -> int:
    """As `os.open`, private where it creates. Raises OSError for whatever is no regular file: a pipe would block."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return fd


def read_file(path: Path, start: int = 0, nbytes: int = -1) -> bytes:
    """Its content from byte `start` on; so many bytes at most."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(start)
        return file.read(nbytes)


def write_file(path: Path, content: bytes) -> None:
    """A file with exactly this content. Raises OSError, also for what did not fit."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(content)


def secure_bytes(fd: int, start: int, nbytes: int) -> None:
    """Make the file hold these bytes: a store through a mapping into a full file system kills the process. Raises
    OSError; some are held then.

    Little by little: many kernels give all of a step back where a signal meets it, in memory, and Python takes the step
    again, for as long as a profiler sends signals.
    """
    for at in range(start, start + nbytes, _SECURED_NBYTES):
        os.posix_fallocate(fd, at, min(_SECURED_NBYTES, start + nbytes - at))


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
                if time.monotonic() >= deadline:  # a file system may give a file another number each time
                    raise LockTimeout
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
