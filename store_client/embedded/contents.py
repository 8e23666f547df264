"""Whose is a folder: what in it is provably a pool's, and how that, and nothing else, is removed.

A data folder is ours if pool.json names it, or if its name proves that it was made here: such a proof cannot be deleted
by whoever cleans up old files. Nothing is removed recursively: only files that bear the names of our layout go, and
folders that are empty then.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import time
from pathlib import Path

from mooncake_connector.errors import PoolError
from store_client.embedded.files import read_file
from store_client.embedded.locks import FileLock, LockTimeout

DESCRIPTION, OPEN_LOCK = "pool.json", "open.lock"
NEW_DESCRIPTION = "pool.json.new"
_FILES = ("table", "feed", "arena", "spaces", "write.lock", "ledger/data.mdb")
_ID = re.compile(r"[0-9a-f]{32}")
_OWNER = re.compile(r"[0-9a-f]{32}(\.new)?")
_REMOVAL_WAIT_S = 5.0
"""For an opening under way to come to its end."""
_NEUTRAL = "lost+found"
"""What an empty ext4 volume holds."""


def new_id() -> str:
    """A name for a data folder: 16 random hex digits, and 16 that follow from them."""
    drawn = os.urandom(8).hex()
    return drawn + _proof(drawn)


def _proof(drawn: str) -> str:
    return hashlib.sha256(f"data folder of a mooncake-connector pool {drawn}".encode()).hexdigest()[:16]


def refuse_foreign(pool: Path) -> None:
    """Raises PoolError for a folder that holds something and is not a pool."""
    if _named(pool) is not None:
        return
    entries = _names(pool)
    known = {name for name in entries if name in (OPEN_LOCK, NEW_DESCRIPTION) and _is_file(pool / name)}
    known |= {name for name in entries if _is_data(pool / name, None)}
    if _is_file(pool / DESCRIPTION) and known - {OPEN_LOCK, NEW_DESCRIPTION}:
        known.add(DESCRIPTION)  # damaged
    foreign = sorted(set(entries) - known - {_NEUTRAL})
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise PoolError(
            f"{pool} is not empty and is not a pool (it holds {shown}); nothing in it was touched: set `pool` to an "
            "empty folder, or to one that does not exist yet"
        )


def is_pool(pool: Path) -> bool:
    """True for a folder in which a pool was made, whatever state it is in."""
    return _named(pool) is not None or any(_is_data(pool / name, None) for name in _names(pool))


def remove_data(pool: Path) -> None:
    """Unlink all data folders that are ours; who has them mapped keeps them."""
    named = _named(pool)
    for name in _names(pool):
        if _is_data(pool / name, named):
            remove_data_folder(pool / name)


def remove_data_folder(data: Path) -> None:
    """Unlink the files of this data folder, and the folder itself if nothing else is in it."""
    owners = [f"owners/{name}" for name in _names(data / "owners") if _OWNER.fullmatch(name)]
    _unlink(data, [name for name in (*_FILES, *owners) if _is_folder((data / name).parent)])
    for name in (data / "ledger", data / "owners", data):
        _rmdir(name)


def remove_pool(pool: Path) -> list[str]:
    """Remove the pool, and its folder if nothing else is in it; returns what was left. Raises OSError."""
    lock = FileLock(pool / OPEN_LOCK, create=True)
    try:
        # A pool that a stopped process keeps locked is one of those that people want to be rid of.
        with contextlib.suppress(LockTimeout):
            lock.acquire(time.monotonic() + _REMOVAL_WAIT_S)
        return _remove_pool(pool)
    finally:
        lock.close()


def _remove_pool(pool: Path) -> list[str]:
    named = _named(pool)
    (pool / DESCRIPTION).unlink(missing_ok=True)  # first: whatever happens next, nobody opens the rest
    for name in _names(pool):
        if _is_data(pool / name, named):
            remove_data_folder(pool / name)
    _unlink(pool, [NEW_DESCRIPTION, OPEN_LOCK])
    left = _names(pool)
    if not left:
        pool.rmdir()
    return left


def _named(pool: Path) -> str | None:
    """The data folder that pool.json names; None where there is no such file of ours, of whatever version."""
    try:
        raw = json.loads(read_file(pool / DESCRIPTION))
    except (OSError, ValueError, RecursionError):
        return None
    name = raw.get("id") if isinstance(raw, dict) and isinstance(raw.get("format"), int) else None
    return name if isinstance(name, str) and _ID.fullmatch(name) else None


def _is_data(folder: Path, named: str | None) -> bool:
    name = folder.name
    proven = bool(_ID.fullmatch(name)) and (name == named or name[16:] == _proof(name[:16]))
    return proven and _is_folder(folder)


def _is_folder(path: Path) -> bool:
    """A real one, not a link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder) if _is_folder(folder) else []
    except OSError:
        return []


def _unlink(folder: Path, names: list[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(folder / name)


def _rmdir(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(folder)
