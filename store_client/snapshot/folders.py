"""Folders that snapshots are in: made aside, put in their place at once, and touched only where they are provably ours.

A folder is opened once, as itself and never as a link, and all that happens in it goes through its descriptor. A lock
(flock) on it tells two commands apart; a file system that has none for folders does without.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mooncake_connector.errors import SnapshotError
from store_client.snapshot.form import INDEX, KIND, MANIFEST, MAX_MANIFEST_NBYTES

_OURS = re.compile(rf"{re.escape(MANIFEST)}|{INDEX}|pages\.[0-9]{{5,}}")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_TRIES = 10

_libc = ctypes.CDLL(None, use_errno=True)


def partial_of(target: Path) -> Path:
    """Where a snapshot is while it is written; after that, for a moment, what it replaced."""
    return target.with_name(target.name + ".partial")


def former_of(target: Path) -> Path:
    """Where the former snapshot is for a moment on file systems that cannot exchange two folders."""
    return target.with_name(target.name + ".former")


def open_folder(path: Path) -> int:
    """Raises OSError, also for a link or for what is no folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_inside(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A regular file in the folder, private where it is created. Raises OSError."""
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", name)
    return fd


def lock(folder: int, how: int) -> bool:
    """False where another process holds it. `how` is LOCK_SH or LOCK_EX."""
    try:
        fcntl.flock(folder, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def read_inside(folder: int, name: str, limit: int) -> bytes:
    """Raises OSError, also for a file of more than `limit` bytes."""
    with os.fdopen(open_inside(folder, name), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
    return content


def why_foreign(folder: int, *, unfinished: bool) -> str | None:
    """Why this folder is not a snapshot of ours, or None. `unfinished`: it may lack a manifest."""
    names = os.listdir(folder)
    foreign = sorted(name for name in names if not _OURS.fullmatch(name))
    if foreign:
        return f"it holds {', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}"
    if MANIFEST in names:
        try:
            written = read_inside(folder, MANIFEST, MAX_MANIFEST_NBYTES)
        except OSError as error:
            return f"{MANIFEST}: {error.strerror}"
        return None if unfinished or KIND.encode() in written else f"{MANIFEST} is of another kind"
    return None if unfinished or not names else f"it has no {MANIFEST}"


def check_target(target: Path) -> None:
    """Raises SnapshotError where a snapshot may not be put, or may not replace what is there."""
    try:
        if not os.path.lexists(target):
            if not target.parent.is_dir():
                raise SnapshotError(f"folder {target.parent} does not exist: make it first")
            return
        folder = open_folder(target)
    except OSError as error:
        raise SnapshotError(
            f"{target} cannot be used ({error.strerror}): name a folder that does not exist yet, or the snapshot "
            "to replace, and no link to it"
        ) from None
    try:
        if os.path.ismount(target):
            raise SnapshotError(f"{target} is a mount point, which cannot be replaced: name a folder below it")
        why = why_foreign(folder, unfinished=False)
    finally:
        os.close(folder)
    if why is not None:
        raise SnapshotError(
            f"{target} is not a snapshot of a pool ({why}) and nothing in it was touched: name another folder, or "
            "delete this one"
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A folder in which a snapshot is made."""

    target: Path
    folder: int
    """Its descriptor."""
    remains: bool
    """Whether the remains of an unfinished snapshot had to go."""


@contextlib.contextmanager
def drafted(target: Path) -> Iterator[Draft]:
    """An empty folder beside `target`, locked; it is removed at the end of the block unless it was published.

    Raises SnapshotError, OSError.
    """
    partial = partial_of(target)
    for _ in range(_TRIES):
        try:
            os.mkdir(partial, 0o700)
            remains = False
        except FileExistsError:
            remains = True
        folder = _open_partial(partial)
        if folder is not None:
            break
    else:
        raise SnapshotError(f"{partial} is used by other processes all the time: try again")
    draft = Draft(target, folder, remains)
    try:
        if remains:
            _empty(folder)
        yield draft
    finally:
        _discard(folder, partial)
        os.close(folder)


def _open_partial(partial: Path) -> int | None:
    """Its descriptor; None where another process has just put it elsewhere."""
    try:
        folder = open_folder(partial)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(f"{partial} is in the way ({error.strerror}): delete it") from None
    try:
        if not lock(folder, fcntl.LOCK_EX):
            raise SnapshotError(f"{partial} is in use: another process takes or reads this snapshot now; try again")
        if not _is_at(folder, partial):
            os.close(folder)
            return None
        _check_ours(folder, partial)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(folder)
        raise
    return folder


def _is_at(folder: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(folder), os.lstat(path))
    except OSError:
        return False


def _empty(folder: int) -> None:
    """Unlink the files that a snapshot has; the manifest first, so that a kill leaves none that seems whole."""
    names = sorted((name for name in os.listdir(folder) if _OURS.fullmatch(name)), key=lambda name: name != MANIFEST)
    for name in names:
        os.unlink(name, dir_fd=folder)


def _discard(folder: int, path: Path) -> None:
    """Remove the folder if it is at `path`, and not where it was to be put."""
    if _is_at(folder, path):
        with contextlib.suppress(OSError):
            _empty(folder)
            os.rmdir(path)


def publish(draft: Draft) -> bool:
    """Put the drafted folder in its place at once; True where that replaced a snapshot.

    A process killed in between leaves one of the two there, whole. Raises OSError.
    """
    target, partial = draft.target, partial_of(draft.target)
    _sync(draft.folder)
    try:
        former = open_folder(target)
    except FileNotFoundError:
        os.rename(partial, target)
        _sync_parent(target)
        return False
    try:
        free = lock(former, fcntl.LOCK_EX)  # who reads it goes on; the next snapshot clears it away
        aside = _exchange(partial, target)
        _sync_parent(target)
        if free:
            _discard(former, aside)
    finally:
        os.close(former)
    return True


def _exchange(partial: Path, target: Path) -> Path:
    """Returns where the former one is now."""
    code = _rename_exchange(partial, target)
    if code == 0:
        return partial
    if code not in _NO_EXCHANGE:
        raise OSError(code, os.strerror(code), os.fspath(target))
    former = former_of(target)
    if not clear_former(target):
        raise SnapshotError(f"{former} is in use: another process takes or reads this snapshot now; try again")
    os.rename(target, former)
    os.rename(partial, target)
    return former


def _rename_exchange(one: Path, other: Path) -> int:
    """0, or the number of the error."""
    if not hasattr(_libc, "renameat2"):
        return errno.ENOSYS
    names = os.fsencode(one), os.fsencode(other)
    failed = _libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    return ctypes.get_errno() if failed else 0


def clear_former(target: Path) -> bool:
    """Remove the former snapshot that was left beside `target`; False where another process uses it.

    Raises OSError, SnapshotError.
    """
    former = former_of(target)
    try:
        folder = open_folder(former)
    except FileNotFoundError:
        return True
    try:
        if not lock(folder, fcntl.LOCK_EX) or not _is_at(folder, former):
            return False
        _check_ours(folder, former)
        _empty(folder)
        os.rmdir(former)
    finally:
        os.close(folder)
    return True


def _check_ours(folder: int, path: Path) -> None:
    """Raises SnapshotError where what is in the way may be somebody else's, and OSError."""
    why = why_foreign(folder, unfinished=True)
    if why is None and os.fstat(folder).st_uid != os.geteuid():
        why = "it belongs to another user"
    if why is not None:
        raise SnapshotError(f"{path} is in the way and was not touched ({why}): delete it, or move it away")


def _sync_parent(target: Path) -> None:
    with contextlib.suppress(OSError):
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _sync(folder)
        finally:
            os.close(folder)


def _sync(folder: int) -> None:
    """Some file systems have nothing to do for a folder, and say so with an error."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
