"""Content fingerprints of large files: xxh3-128 over all bytes, in parallel, remembered between processes.

Files are read with `preadv` into buffers instead of being mapped: a mapped file that is truncated by somebody else
kills the process that reads it. Reading and hashing release the GIL.
"""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.log import get_logger, log_once

SLICE_NBYTES = 16 << 20

# Timestamps advance in ticks: a file changed twice within one tick looks unchanged. One that was touched so shortly
# before it was read is not remembered.
SETTLED_S = 2.0
# How long to wait for another process that is reading the same file before reading it as well.
PATIENCE_S = 30.0

_MAX_THREADS = 8
_MAX_AHEAD = 2 * _MAX_THREADS
"""Slices that are asked for: a process that ends meanwhile waits for those, and not for all of a large file."""
_CACHE_VERSION = 1
_logger = get_logger(__name__)


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/mooncake-connector`, or `~/.cache/mooncake-connector`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mooncake-connector"


def fingerprint_files(files: Sequence[Path], cache_dir: Path | None) -> dict[Path, str]:
    """For each file "<size>-<32 hex digits>", equal for equal content wherever it lies.

    With a usable `cache_dir` a file is read again only when its device, inode, size, mtime or ctime changed; a cache
    that cannot be used costs time and one log line. Raises ModelIdentityError for a file that cannot be read.
    """
    if not files:
        return {}
    usable = _prepared(cache_dir)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "fingerprint") as pool:
        return {file: _cached_fingerprint(file, usable, pool) for file in files}


def _cached_fingerprint(file: Path, cache_dir: Path | None, pool: Executor) -> str:
    try:
        if cache_dir is None:
            return _fingerprint(file, pool)
        status = os.stat(file)
        entry = cache_dir / f"{status.st_dev:x}-{status.st_ino:x}.json"
        known = _remembered(entry, status)
        if known is not None:
            return known
        with _only_reader(entry):
            known = _remembered(entry, status)
            if known is not None:
                return known
            started = time.time()
            value = _fingerprint(file, pool)
            if started - max(status.st_ctime, status.st_mtime) >= SETTLED_S and _same(status, os.stat(file)):
                _remember(entry, status, value)
            return value
    except OSError as error:
        raise ModelIdentityError(f"{file} cannot be read: {error}") from None


def _fingerprint(file: Path, pool: Executor) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor)
        offsets = range(0, before.st_size, SLICE_NBYTES)
        whole = xxhash.xxh3_128()
        asked: deque[Future[bytes]] = deque()
        for offset in offsets:
            asked.append(pool.submit(_slice_digest, descriptor, offset, before.st_size))
            if len(asked) == _MAX_AHEAD:
                whole.update(asked.popleft().result())
        for part in asked:
            whole.update(part.result())
        if not _same(before, os.fstat(descriptor)):
            raise ModelIdentityError(f"{file} changed while it was read: wait until it is complete, then start again")
        return f"{before.st_size}-{whole.hexdigest()}"
    finally:
        os.close(descriptor)


def _slice_digest(descriptor: int, offset: int, size: int) -> bytes:
    view = memoryview(bytearray(min(SLICE_NBYTES, size - offset)))
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break  # truncated meanwhile: the comparison of sizes afterwards says so
        done += count
    hasher = xxhash.xxh3_128()
    hasher.update(view[:done])
    return hasher.digest()


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return _stamp(one) == _stamp(other)


def _stamp(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _prepared(cache_dir: Path | None) -> Path | None:
    """The folder, created 0700 if missing, or None where it cannot be used or others could write to it."""
    if cache_dir is None:
        return None
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.stat(cache_dir)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError("it belongs to, or is writable by, somebody else")
        if not os.access(cache_dir, os.W_OK | os.X_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        _not_cached(cache_dir, error)
        return None
    return cache_dir


def _not_cached(where: Path, error: Exception) -> None:
    log_once(
        f"fingerprint.cache:{where}",
        "fingerprints of model files are not remembered in %s, every start reads the weights: %s",
        where,
        error,
        logger=_logger,
    )


def _remembered(entry: Path, status: os.stat_result) -> str | None:
    try:
        content = json.loads(entry.read_bytes())
        if content["version"] == _CACHE_VERSION and content["stamp"] == _stamp(status):
            value = content["fingerprint"]
            return value if isinstance(value, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, damaged or of another version: the file is read again
    return None


def _remember(entry: Path, status: os.stat_result, value: str) -> None:
    content = {"version": _CACHE_VERSION, "stamp": _stamp(status), "fingerprint": value}
    try:
        descriptor, name = tempfile.mkstemp(dir=entry.parent, prefix=".new-")  # mode 0600
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(content, file)
            os.replace(name, entry)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _not_cached(entry.parent, error)


@contextlib.contextmanager
def _only_reader(entry: Path) -> Iterator[None]:
    """Let one process at a time read a file, so that the ranks of an instance read it once.

    The lock falls with its holder; a holder that takes longer than PATIENCE_S is not waited for, which costs a second
    reading and nothing else.
    """
    try:
        descriptor = os.open(entry.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _not_cached(entry.parent, error)
        yield
        return
    try:
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
