"""Opening a pool: create it, check it, rebuild what cannot be trusted, and never touch what others have mapped.

A rebuild makes a new data folder and points pool.json to it; the old files are unlinked, so that processes which
still have them mapped go on reading until they notice.
"""

import errno
import os
import stat
import time
from pathlib import Path

import lmdb

from mooncake_connector.errors import PoolError
from mooncake_connector.log import get_logger
from mooncake_connector.sizes import human_nbytes
from store_client.embedded import folder
from store_client.embedded.arena import GRANULE
from store_client.embedded.faults import DAMAGE
from store_client.embedded.feed import FEED_NBYTES, Feed
from store_client.embedded.folder import Description, Unusable
from store_client.embedded.ledger import Ledger, map_nbytes
from store_client.embedded.locks import FileLock, LockTimeout, secure_bytes
from store_client.embedded.policies import DEFAULT_POLICY, hints_nbytes, policy_number
from store_client.embedded.pool import Pool
from store_client.embedded.table import Table, table_nbytes

logger = get_logger(__name__)

_GROWS_IN_PLACE = 4
"""A capacity up to so many times the one the index was made for keeps the pages; beyond, the pool is rebuilt."""


def open_pool(
    path: Path, capacity_nbytes: int | None, eviction: str | None, deadline_s: float, *, rebuild: bool = True,
    distrusted: Path | None = None,
) -> Pool:  # fmt: skip
    """Open the pool at `path`, creating or rebuilding it if need be. Raises PoolError.

    With `rebuild` false a pool that is unusable or not there is an error: for who only looks, and for processes that
    follow another one's replacement. What is in `distrusted`, a data folder, was found damaged while it was in use.
    """
    deadline = time.monotonic() + deadline_s
    try:
        if not rebuild and not path.is_dir():  # whoever removed it does not want it back, not even empty
            raise PoolError(f"pool {path} is not used: there is no such folder; the next engine that starts makes it")
        folder.secure_folder(path)
        lock = _open_lock(path)
        try:
            lock.acquire(deadline)
            try:
                return _open_locked(path, capacity_nbytes, eviction, deadline, rebuild, distrusted)
            finally:
                lock.release()
        finally:
            lock.close()
    except PoolError:
        raise
    except LockTimeout:
        raise PoolError(
            f"pool {path} stayed locked for {deadline_s:g} s: another process holds it and does not run (stopped, or "
            "under a debugger); continue or end that process, or set `pool` to another folder"
        ) from None
    except OSError as error:
        raise PoolError(f"pool {path} cannot be opened: {error}; set `pool` to another folder") from None
    except Exception as error:
        raise PoolError(f"pool {path} cannot be opened: {error!r}") from error


def _open_lock(path: Path) -> FileLock:
    try:
        return FileLock(path / folder.OPEN_LOCK, create=True)
    except OSError as error:
        raise PoolError(
            f"pool folder {path} cannot be written: {folder.OPEN_LOCK}: {error.strerror}; set `pool` to another one"
        ) from None


def _open_locked(
    path: Path, capacity: int | None, eviction: str | None, deadline: float, rebuild: bool, distrusted: Path | None
) -> Pool:
    try:
        description = folder.read_description(path)
        if description is not None:
            if description.data(path) == distrusted:
                raise Unusable("damage was found while it was in use")
            return _open_existing(path, description, capacity, eviction, deadline)
        if not rebuild:
            raise Unusable(f"{folder.DESCRIPTION} is missing")
    except Unusable as reason:
        if not rebuild:
            raise PoolError(f"pool {path} is not used: {reason}; the next engine that starts rebuilds it") from None
        logger.warning("pool %s is rebuilt, empty: %s; its pages will be recomputed", path, reason)
    folder.remove_data(path)
    chosen = folder.check_capacity(path, capacity, 0)
    description = _create(path, chosen, eviction)
    try:
        return _open_existing(path, description, chosen, eviction, deadline)
    except Unusable as reason:
        raise PoolError(f"pool {path} was just created and cannot be used ({reason}); choose another `pool`") from None


def _create(path: Path, capacity: int, eviction: str | None) -> Description:
    """A new, empty data folder, all of its index secured, and pool.json that points to it."""
    description = folder.new_description(capacity)
    data = description.data(path)
    try:
        data.mkdir(mode=0o700)
        (data / "ledger").mkdir(mode=0o700)
        (data / "owners").mkdir(mode=0o700)
        max_pages = description.max_pages
        sizes = {"table": table_nbytes(max_pages), "policy": hints_nbytes(max_pages), "feed": FEED_NBYTES}
        sizes |= {"spaces": 0, "arena": 0}
        for name, nbytes in sizes.items():
            _secure(data / name, nbytes, os.O_CREAT | os.O_EXCL)
        os.truncate(data / "arena", capacity)
        table, feed = Table(data / "table", description.max_pages), Feed(data / "feed", description.ring)
        ledger = Ledger(data / "ledger", table, feed)
        _secure(data / "ledger" / "data.mdb", map_nbytes(description.max_pages))
        table.set_eviction(policy_number(eviction or DEFAULT_POLICY))
        ledger.found(capacity // GRANULE)
        ledger.close()
        folder.write_description(path, description)
    except OSError as error:
        folder.remove_data_folder(data)
        raise PoolError(_cannot_create(path, capacity, error)) from None
    except lmdb.Error as error:
        folder.remove_data_folder(data)
        raise PoolError(f"pool {path}: its index cannot be made: {error}; set `pool` to another folder") from None
    return description


def _cannot_create(path: Path, capacity: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free, index = human_nbytes(folder.free_nbytes(path)), human_nbytes(folder.overhead_nbytes(capacity))
        return (
            f"pool {path}: the file system is full, {free} are free and the index for {human_nbytes(capacity)} takes "
            f"{index}; free space or set a smaller `capacity`"
        )
    return f"pool {path} cannot be created: {error.strerror}; set `pool` to a folder you can write"


def _secure(path: Path, nbytes: int, flags: int = 0) -> None:
    """Make the file hold so many bytes."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        secure_bytes(fd, 0, nbytes)
    finally:
        os.close(fd)


def _check_files(data: Path, description: Description) -> None:
    """Raises Unusable for a file that is missing, is no file, or has another size than its mapping will have."""
    expected = {
        "table": table_nbytes(description.max_pages),
        "feed": FEED_NBYTES,
        "ledger/data.mdb": map_nbytes(description.max_pages),
    }
    for name in ("table", "feed", "ledger", "ledger/data.mdb", "arena", "spaces", "owners"):
        try:
            status = os.lstat(data / name)
        except OSError as error:
            raise Unusable(f"{name} cannot be read ({error.strerror})") from None
        right, kind = (stat.S_ISDIR, "folder") if name in ("ledger", "owners") else (stat.S_ISREG, "file")
        if not right(status.st_mode):
            raise Unusable(f"{name} is not a {kind}")
        if name in expected and status.st_size != expected[name]:
            raise Unusable(f"{name} has {status.st_size} bytes and should have {expected[name]}")


def _open_existing(
    path: Path, description: Description, capacity: int | None, eviction: str | None, deadline: float
) -> Pool:
    if capacity is not None and folder.pages_for(capacity) > _GROWS_IN_PLACE * description.max_pages:
        folder.check_capacity(path, capacity, folder.held_nbytes(path))  # an impossible one must not cost the pool
        wanted = human_nbytes(capacity)
        raise Unusable(f"capacity {wanted} is more than its index of {description.max_pages} pages can serve")
    _check_files(description.data(path), description)
    try:
        return Pool(path, description, capacity, eviction, deadline)
    except DAMAGE as error:
        raise Unusable(f"its index is damaged ({type(error).__name__}: {error})") from None
    except lmdb.Error as error:
        # Anything else (no memory, no descriptors left, open already) says nothing about what is in the pool.
        raise PoolError(f"pool {path} cannot be opened: {error}") from None
    except OSError as error:
        raise PoolError(f"pool {path} cannot be opened: {error}; set `pool` to another folder") from None
