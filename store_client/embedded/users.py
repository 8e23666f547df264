"""Lists the processes that have a pool open, without opening it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from mooncake_connector.errors import PoolError
from store_client.embedded.layout import Unusable, read_description
from store_client.embedded.locks import FileLock, LockTimeout
from store_client.embedded.whoami import PoolUser, read_user

_DEADLINE_S = 2.0


def pool_users(pool: Path) -> list[PoolUser] | None:
    """The other live processes that have the pool open, the oldest first; None where that cannot be found out.

    A pool that is made anew leaves out those that still have the old one mapped.
    """
    try:
        description = read_description(pool)
    except (Unusable, PoolError, RecursionError):
        return None
    if description is None:
        return []
    try:
        lock = FileLock(pool / "open.lock")
    except OSError:
        return None
    # Under the lock: a process that is just opening must not find its own file locked by us.
    try:
        lock.acquire(time.monotonic() + _DEADLINE_S)
        try:
            found = [_user(path) for path in (description.data(pool) / "owners").iterdir()]
        finally:
            lock.release()
    except (LockTimeout, OSError):
        return None
    finally:
        lock.close()
    others = [user for user in found if user is not None and not (user.here and user.pid == os.getpid())]
    return sorted(others, key=lambda user: -user.since_s)


def _user(path: Path) -> PoolUser | None:
    """None for a process that lives no more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return read_user(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
