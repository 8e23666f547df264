"""The processes that have a pool open: one locked file each, with who the process is and what it has counted.

Liveness is never a PID: processes of one pool may live in containers whose PID namespaces differ. What a process writes
about itself is for whoever asks later who uses the pool; nobody's life is judged by it. What it counted reaches the
pool though it may never write: a put hands the counts over, and those of a process that was killed are taken over with
its file.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mooncake_connector.errors import PoolError
from store_client.embedded.folder import OPEN_LOCK, Unusable, read_description
from store_client.embedded.locks import FileLock, LockTimeout, open_file, read_file
from store_client.embedded.names import U64
from store_client.embedded.table import CAUSES, COUNTERS

_NAME = re.compile(r"[0-9a-f]{32}")
_DESCRIPTION_NBYTES = 4096
_COUNTS_AT, _COUNTS_NBYTES = 4096, 4096
_DEVICE_AT = _COUNTS_NBYTES // 8 - 1
"""Of the words of the counts' page, the one that is not 0 where a device may write into what the process reserved."""
_DEVICE_STOPS_S = 10.0
"""A process that is killed may be gone before its device has stopped: by then it has."""
_MAX_COMMAND = 400
_SECRET = re.compile(r"(?:^|[-_.])(?:api[-_]?key|key|token|secret|password|passwd|credentials?|auth)$", re.IGNORECASE)
_SECRET_IN_JSON = re.compile(r'("[^"]*(?:key|token|secret|passw)[^"]*"\s*:\s*)"[^"]*"', re.IGNORECASE)
_USERS_DEADLINE_S = 2.0
_COUNTS = (*COUNTERS, *CAUSES)
_COUNT_AT = {name: i for i, name in enumerate(_COUNTS)}
_MASK = 0xFFFFFFFFFFFFFFFF


class Counters:
    """Named counts in `page`, memory that other processes may read at any time."""

    def __init__(self, page: U64) -> None:
        self._lock = threading.Lock()
        self._page = page

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._page[_COUNT_AT[name]] = (int(self._page[_COUNT_AT[name]]) + count) & _MASK

    def take(self) -> dict[str, int]:
        """The counts, which begin at zero again."""
        with self._lock:
            counts = _as_counts(self._page)
            self._page[: len(_COUNTS)] = 0
        return counts

    def move(self, page: U64) -> None:
        """Go on in other memory."""
        with self._lock:
            page[: len(_COUNTS)], page[_DEVICE_AT] = self._page[: len(_COUNTS)], self._page[_DEVICE_AT]
            self._page = page

    def has_device(self) -> None:
        """From now on a device may write into what this process reserves."""
        with self._lock:
            self._page[_DEVICE_AT] = 1

    def abandon_in_child(self) -> None:
        """After a fork: the page is the parent's."""
        self._lock = threading.Lock()
        self._page = np.zeros(len(_COUNTS), dtype=np.uint64)


def _as_counts(page: U64) -> dict[str, int]:
    return {name: count for name, count in zip(_COUNTS, page.tolist(), strict=False) if count}


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
        self._gone_s: dict[bytes, float] = {}
        """When owners with a device were first found without their lock."""
        self._fd, page = self._make(self._path)
        self.counters = Counters(page)

    def _make(self, path: Path) -> tuple[int, U64]:
        """A locked file that says who this is, and the counts in it, mapped: see `Counters`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PoolError(
                    f"pool folder {self._folder} has no flock ({error}): set `pool` to another one"
                ) from None
            _introduce(fd)
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
            self._fd = fd
            self.counters.move(page)
            return True

    def counts(self, owner: bytes | None = None) -> dict[str, int]:
        """What this owner has counted and not handed over yet; without one, all owners together."""
        return waiting_counts(self._folder, owner)

    def is_dead(self, owner: bytes) -> bool:
        """True if no process holds the lock of `owner` any more: a file that is gone proves nothing.

        One whose device may still write counts as alive for a while.
        """
        if owner == self.id:
            return False
        try:
            fd = os.open(self._folder / owner.hex(), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            had_device = any(os.pread(fd, 8, _COUNTS_AT + 8 * _DEVICE_AT))
        except OSError:
            return False
        finally:
            os.close(fd)
        now_s = time.monotonic()
        return not had_device or now_s - self._gone_s.setdefault(owner, now_s) >= _DEVICE_STOPS_S

    def is_stopping(self, owner: bytes) -> bool:
        """Whether it is gone, and its device may still write."""
        return owner in self._gone_s and not self.is_dead(owner)

    def forget(self, owner: bytes) -> None:
        self._gone_s.pop(owner, None)
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
        self.counters.abandon_in_child()


def waiting_counts(folder: Path, owner: bytes | None = None) -> dict[str, int]:
    """What the owners in a folder, or one of them, have counted and not handed over yet. Raises OSError."""
    total: U64 = np.zeros(_COUNTS_NBYTES // 8, dtype=np.uint64)
    for name in [owner.hex()] if owner is not None else os.listdir(folder):
        try:
            content = read_file(folder / name, _COUNTS_AT, _COUNTS_NBYTES)
        except OSError:
            continue
        total += np.frombuffer(content.ljust(_COUNTS_NBYTES, b"\0"), dtype="<u8")
    return _as_counts(total)


@dataclass(frozen=True, slots=True)
class PoolUser:
    """A process that has the pool open."""

    pid: int | None
    """Its number in its own namespace; None where it left no description (an older version, a full file system)."""
    here: bool
    """Whether `pid` is a number of the reader's own namespace. Else the process runs in another container."""
    host: str
    since_s: float
    """Seconds since it opened the pool."""
    command: str
    """Its command line, without what looks like a secret."""


def _introduce(fd: int) -> None:
    """Write a description of this process into the file `fd`; where that fails, there is none."""
    text = json.dumps(
        {
            "pid": os.getpid(),
            "namespace": _namespace(),
            "host": socket.gethostname(),
            "since": time.time(),
            "command": _command(os.getpid()),
        }
    )
    try:
        os.pwrite(fd, text.encode("utf-8", "backslashreplace")[:_DESCRIPTION_NBYTES], 0)
    except OSError:
        return


def _read_user(fd: int) -> PoolUser:
    """The process whose file `fd` is."""
    try:
        found = json.loads(os.pread(fd, _DESCRIPTION_NBYTES, 0).rstrip(b"\0"))
        pid, since = int(found["pid"]), float(found["since"])
        host, command = str(found["host"])[:256], str(found["command"])[:_MAX_COMMAND]
        here = found["namespace"] == _namespace() != ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return PoolUser(None, False, "", max(0.0, time.time() - os.fstat(fd).st_mtime), "")
    return PoolUser(pid, here, host, max(0.0, time.time() - since), (_command(pid) if here else "") or command)


def _namespace() -> str:
    try:
        return f"{os.readlink('/proc/self/ns/pid')} of {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").removesuffix("\0").split("\0")
    except OSError:
        return ""
    shown: list[str] = []
    hide = asked = False
    for word in words:
        name, equals, _ = word.partition("=")
        hide = asked or (hide and not word.startswith("-"))  # an option may take several: `--api-key ONE TWO`
        if hide:
            shown.append("***")
        elif equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(_SECRET_IN_JSON.sub(r'\1"***"', word))
        asked = not equals and word.startswith("-") and bool(_SECRET.search(word))
    return " ".join(shown).strip()[:_MAX_COMMAND]


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
        lock = FileLock(pool / OPEN_LOCK)
    except OSError:
        return None
    # Under the lock: a process that is just opening must not find its own file locked by us.
    try:
        lock.acquire(time.monotonic() + _USERS_DEADLINE_S)
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
        return _read_user(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
