"""Opening what should be a file of the pool: a regular file, or an error at once; never a wait, never a link."""

import errno
import os
import stat
from pathlib import Path


def open_file(path: Path, flags: int) -> int:
    """As `os.open`, private where it creates. Raises OSError for whatever is no regular file: a pipe would block."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return fd


def read_file(path: Path, start: int = 0) -> bytes:
    """Its content from byte `start` on."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        file.seek(start)
        return file.read()


def write_file(path: Path, content: bytes) -> None:
    """A file with exactly this content. Raises OSError, also for what did not fit."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        file.write(content)
