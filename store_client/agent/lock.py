"""The lock that makes an agent the only one of its pool: a file in the pool's folder, held until its process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from store_client.agent.sockets import keep_from_children, release
from store_client.embedded.folder import AGENT_LOCK
from store_client.embedded.locks import open_file


def hold(pool: Path) -> int | None:
    """A descriptor of the lock, which is now this process's; None where another one has it. Raises OSError."""
    fd = keep_from_children(open_file(pool / AGENT_LOCK, os.O_RDWR | os.O_CREAT))  # before it locks anything
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_in_place(pool, fd):
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        let_go(fd)
        raise
    let_go(fd)
    return None


def take_over(fd: int) -> int:
    """A lock that was handed over by the process that started this one."""
    os.set_inheritable(fd, False)
    return keep_from_children(fd)


def let_go(fd: int) -> None:
    """Close it; where another process was given the lock as well, it goes on holding it."""
    release(fd)
    os.close(fd)


def is_in_place(pool: Path, fd: int) -> bool:
    """False where the pool's folder, or the file, was removed or replaced: others would lock another one."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(pool / AGENT_LOCK))
    except OSError:
        return False
