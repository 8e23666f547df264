"""Finds, opens and deletes the pool folder that a command is about. A command line never creates a pool."""

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from mooncake_connector.cli.tables import ID_DIGITS, user_text
from mooncake_connector.config.sources import environ_name, load_config
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Store
from store_client.embedded import pool_users
from store_client.embedded.folder import is_pool, remove_pool, usual_places
from store_client.embedded.locks import LockTimeout


def locate(pool: Path | None) -> Path:
    """The folder of an existing pool: the one given, else the configured one, else where engines put it by default.

    Raises PoolError where there is none, and ConfigError for a configuration that cannot be used.
    """
    candidates = _candidates(pool)
    for folder in candidates:
        try:
            os.scandir(folder).close()
            if is_pool(folder):
                return folder
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise PoolError(f"pool folder {folder} cannot be read: {error.strerror}") from None
    folder = candidates[0]
    what = "is not a pool" if folder.exists() else "does not exist"
    raise PoolError(
        f"pool folder {folder} {what}: an engine creates its pool when it starts; "
        f"name another folder with --pool or {environ_name('pool')}"
    )


def _candidates(pool: Path | None) -> list[Path]:
    if pool is not None:
        return [pool.absolute()]
    configured = load_config().pool
    return [configured] if configured is not None else usual_places()


@contextlib.contextmanager
def opened(pool: Path | None) -> Iterator[EmbeddedStore]:
    """The store in an existing pool folder, closed at the end of the block. Raises as `locate`, and as opening does.

    Where the pool is locked, the error also says who has it open: one of these processes does not run.
    """
    folder = locate(pool)
    try:
        store = EmbeddedStore(folder, rebuild=False)
        try:
            yield store
        finally:
            store.close()
    except PoolError as error:
        users = pool_users(folder) if isinstance(error.__context__, LockTimeout) else None
        if not users:
            raise
        raise PoolError(f"{error}; it is open in {', '.join(map(user_text, users))}") from None


def find_namespace(store: Store, beginning: str | None) -> bytes | None:
    """The digest whose hex digits begin with `beginning`; None for None. Raises PoolError unless exactly one does."""
    known = {space.namespace.digest: space.namespace.model_name for space in store.namespaces()}
    return match_namespace(known, beginning, "this pool")


def match_namespace(known: Mapping[bytes, str], beginning: str | None, where: str) -> bytes | None:
    """As `find_namespace`, among digests with their models' names."""
    if beginning is None:
        return None
    matching = [digest for digest in known if digest.hex().startswith(beginning.lower())]
    if beginning and len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{digest.hex()[:ID_DIGITS]} ({name})" for digest, name in sorted(known.items())) or "none"
    problem = "is the beginning of several namespaces" if matching else f"is no namespace of {where}"
    problem = problem if beginning else "is empty"
    raise PoolError(f"--namespace {beginning!r} {problem}; it has {listed}")


def folder_nbytes(folder: Path) -> int:
    """Bytes that the files below `folder` occupy; holes do not count."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


def destroy(folder: Path) -> int:
    """Delete a pool folder; return the bytes it occupied. Raises PoolError that names what could not be deleted."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PoolError(f"pool folder {folder} is a symbolic link: name the folder that it points to")
    if status.st_uid != os.geteuid():
        raise PoolError(f"pool folder {folder} belongs to user {status.st_uid}, not to you: only its owner deletes it")
    freed = folder_nbytes(folder)
    try:
        left = remove_pool(folder)
    except OSError as error:
        raise PoolError(f"pool folder {folder} could not be deleted completely: {error}") from None
    if left:
        raise PoolError(
            f"the pool in {folder} is deleted, the folder is not: it also holds {', '.join(sorted(left)[:3])}, which "
            "the pool did not make"
        )
    return freed
