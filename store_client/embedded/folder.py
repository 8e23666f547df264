"""The pool folder: what lies in it, who may use it, how large things are, and what of it is provably ours to remove.

<pool>/pool.json      which data folder is current; replaced as a whole, never edited
<pool>/open.lock      held while a process opens or rebuilds the pool
<pool>/agent.*        what the agent leaves, where there is one: socket, lock, log, marks of what it shall forget
<pool>/<id>/          ledger/data.mdb, table, feed, arena, spaces, evicted, requests, policy, owners/

A data folder is ours if pool.json names it, or if its name proves that it was made here: such a proof cannot be deleted
by whoever cleans up old files. Nothing is removed recursively: only files that bear the names of our layout go, and
folders that are empty then. Opening is `opening`'s business.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from mooncake_connector.errors import PoolError
from mooncake_connector.sizes import human_nbytes
from store_client.embedded import evicted, feed, ledger, table
from store_client.embedded.arena import GRANULE
from store_client.embedded.locks import FileLock, LockTimeout, read_file, write_file
from store_client.embedded.memory_limit import left_for
from store_client.embedded.policies import hints_nbytes

DESCRIPTION, OPEN_LOCK = "pool.json", "open.lock"
NEW_DESCRIPTION = "pool.json.new"
AGENT_SOCKET, AGENT_LOCK, AGENT_LOG = "agent.sock", "agent.lock", "agent.log"
AGENT_MARK = re.compile(r"agent\.forget\.([0-9a-f]{64}|all)(?:\.[0-9a-f]{16})?")
_FILES = (
    "table", "feed", "arena", "spaces", "evicted", "requests", "policy", "policy.new", "write.lock", "ledger/data.mdb",
)  # fmt: skip
_ID = re.compile(r"[0-9a-f]{32}")
_OWNER = re.compile(r"[0-9a-f]{32}(\.new)?")
_REMOVAL_WAIT_S = 5.0
"""For an opening under way to come to its end."""
_NEUTRAL = "lost+found"
"""What an empty ext4 volume holds."""
FORMAT_VERSION = 4
MIN_CAPACITY_NBYTES = 1 << 20
MAX_DEFAULT_CAPACITY_NBYTES = 16 << 30
_DEFAULT_NEEDS_NBYTES = 512 << 20
_SMALLEST_MEAN_PAGE_NBYTES = 32 << 10
_MIN_PAGES = 1024


class Unusable(Exception):
    """What is in the folder cannot be used and may be rebuilt; the message says why."""


@dataclass(frozen=True, slots=True)
class Description:
    """Contents of pool.json."""

    format: int
    id: str
    boot_id: str
    max_pages: int
    created: float

    def data(self, pool: Path) -> Path:
        return pool / self.id

    @property
    def ring(self) -> int:
        """Tells the feed of this data folder from all others."""
        return int(self.id[:16], 16)


def default_pool_path() -> Path:
    """The per-user pool folder under /dev/shm."""
    return Path(f"/dev/shm/mooncake-connector-{os.geteuid()}")


def usual_places() -> list[Path]:
    """Where a pool may be whose folder was not set: the default, and where it goes when shared memory is too small."""
    usual = default_pool_path()
    return [usual, *(Path(folder) / usual.name for folder in (tempfile.gettempdir(), "/var/tmp"))]


def choose_default(capacity_nbytes: int | None) -> tuple[Path, str | None]:
    """The default folder, or one on disk where shared memory is too small; and then a line that says so."""
    wanted = _DEFAULT_NEEDS_NBYTES if capacity_nbytes is None else overhead_nbytes(capacity_nbytes) + capacity_nbytes
    size, shm = human_nbytes(wanted), default_pool_path()
    if os.path.lexists(shm / DESCRIPTION) or free_nbytes(shm.parent) >= wanted:
        return shm, None
    for parent in (Path(tempfile.gettempdir()), Path("/var/tmp")):
        if free_nbytes(parent) >= wanted:
            chosen = parent / shm.name
            return chosen, (
                f"{shm.parent} has {human_nbytes(free_nbytes(shm.parent))} free, the pool wants {size}: "
                f"using {chosen} instead, which is slower; give the container more shared memory (docker --shm-size), "
                "or set `pool`"
            )
    raise PoolError(
        f"no room for a pool of {size}: {shm.parent} has {human_nbytes(free_nbytes(shm.parent))} free, "
        f"{tempfile.gettempdir()} and /var/tmp have less as well; set `pool` to a folder with room, or "
        "a smaller `capacity`"
    )


def free_nbytes(folder: Path) -> int:
    """What this user may still write on the folder's file system; 0 if there is no such folder."""
    try:
        info = os.statvfs(folder)
    except OSError:
        return 0
    return info.f_bavail * info.f_frsize


def pages_for(capacity_nbytes: int) -> int:
    """Pages that the index has room for, at a mean size of 32 KiB."""
    return max(_MIN_PAGES, capacity_nbytes // _SMALLEST_MEAN_PAGE_NBYTES)


def index_nbytes(max_pages: int) -> int:
    mapped = table.table_nbytes(max_pages) + ledger.map_nbytes(max_pages)
    return mapped + feed.FEED_NBYTES + evicted.evicted_nbytes(max_pages) + hints_nbytes(max_pages)


def overhead_nbytes(capacity_nbytes: int) -> int:
    return index_nbytes(pages_for(capacity_nbytes))


def default_capacity_nbytes(pool: Path) -> int:
    """Of a new pool in this folder: a quarter of what is free there, or of what a memory limit leaves."""
    left, room = left_for(pool), free_nbytes(pool)
    return min((room if left is None else min(room, left)) // 4, MAX_DEFAULT_CAPACITY_NBYTES)


def check_capacity(pool: Path, capacity_nbytes: int | None, held_nbytes: int, granted_nbytes: int = 0) -> int:
    """The capacity to use, in bytes. `held_nbytes`: what the pool has of the file system already.

    A capacity up to `granted_nbytes`, which the pool has, is right however full the file system is by now.

    Raises PoolError for one that is too small, or larger than the file system has room for.
    """
    room = free_nbytes(pool) + held_nbytes
    if capacity_nbytes is None:
        capacity_nbytes = default_capacity_nbytes(pool)
        hint = (
            "a quarter of what is free there and within the memory limit; give the file system or the container more, "
            "or set `pool` to another folder"
        )
    else:
        hint = "the `capacity` that was set"
    if capacity_nbytes < MIN_CAPACITY_NBYTES:
        raise PoolError(
            f"pool {pool}: capacity {human_nbytes(capacity_nbytes)} ({hint}) is below the smallest one, "
            f"{human_nbytes(MIN_CAPACITY_NBYTES)}"
        )
    needed = capacity_nbytes + overhead_nbytes(capacity_nbytes)
    if needed > room and capacity_nbytes > granted_nbytes:
        raise PoolError(
            f"pool {pool}: capacity {human_nbytes(capacity_nbytes)} takes {human_nbytes(needed)} with its index, and "
            f"the file system has room for {human_nbytes(room)}; set a smaller `capacity`, or `pool` to another folder"
        )
    left = None if granted_nbytes else left_for(pool)  # one that has an index keeps it
    if left is not None and (index := overhead_nbytes(capacity_nbytes)) > left + held_nbytes:
        raise PoolError(
            f"pool {pool}: the index for capacity {human_nbytes(capacity_nbytes)} takes {human_nbytes(index)}, and the "
            f"memory limit of this process's control group leaves {human_nbytes(left + held_nbytes)}; set a smaller "
            "`capacity`, or give the container more memory"
        )
    return capacity_nbytes // GRANULE * GRANULE


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def secure_folder(pool: Path) -> None:
    """Create the pool folder, or make sure that it is ours alone and holds nothing else. Raises PoolError."""
    try:
        pool.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = os.lstat(pool)
    except OSError as error:
        raise PoolError(
            f"pool folder {pool} cannot be created: {error.strerror}; set `pool` to a folder you can write"
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise PoolError(f"pool {pool} is not a folder of its own (a link, perhaps); set `pool` to a real folder")
    if info.st_uid != os.geteuid():
        raise PoolError(
            f"pool folder {pool} belongs to user id {info.st_uid}, this process runs as {os.geteuid()}; a pool is "
            "never shared between users: set `pool` to a folder of your own"
        )
    refuse_foreign(pool)  # before any advice about its mode
    if info.st_mode & 0o077:
        raise PoolError(
            f"pool folder {pool} has mode {info.st_mode & 0o777:04o}: others may reach it; `chmod 700 {pool}`, or set "
            "`pool` to another folder"
        )
    if not os.access(pool, os.W_OK | os.X_OK) or os.statvfs(pool).f_flag & os.ST_RDONLY:
        raise PoolError(f"pool folder {pool} is read-only; set `pool` to a folder you can write")


def read_description(pool: Path) -> Description | None:
    """pool.json, or None where there is none. Raises Unusable; PoolError for a pool of a newer version."""
    try:
        raw = json.loads(read_file(pool / DESCRIPTION))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Unusable(f"pool.json cannot be read ({error})") from None
    version = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(version, int) or version < FORMAT_VERSION:
        raise Unusable(f"it has format {version}, this version writes {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise PoolError(
            f"pool {pool} has format {version}, written by a newer mooncake-connector; this one knows up to "
            f"{FORMAT_VERSION}: upgrade it, set `pool` to another folder, or delete this one with `mooncake-connector "
            f"store destroy --pool {pool}`"
        )
    try:
        description = Description(**raw)
        uuid.UUID(hex=description.id)
    except (TypeError, ValueError, AttributeError):
        raise Unusable("pool.json is not what this version writes") from None
    if not isinstance(description.max_pages, int) or description.max_pages < 1:
        raise Unusable(f"pool.json says max_pages {description.max_pages!r}")
    if description.boot_id != boot_id():
        raise Unusable("the machine was restarted, which a pool does not survive")
    return description


def new_description(capacity_nbytes: int) -> Description:
    return Description(FORMAT_VERSION, new_id(), boot_id(), pages_for(capacity_nbytes), time.time())


def write_description(pool: Path, description: Description) -> None:
    """Make this data folder the current one, at once and as a whole."""
    temporary = pool / NEW_DESCRIPTION
    write_file(temporary, json.dumps(asdict(description)).encode())
    os.replace(temporary, pool / DESCRIPTION)


def held_nbytes(pool: Path) -> int:
    """What the files below the pool folder take of the file system."""
    total = 0
    for folder, _, names in os.walk(pool):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total


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
    known |= {name for name in entries if _is_agents(name)}
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
    _unlink(pool, [NEW_DESCRIPTION, OPEN_LOCK, *filter(_is_agents, _names(pool))])
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


def _is_agents(name: str) -> bool:
    return name in (AGENT_SOCKET, AGENT_LOCK, AGENT_LOG) or AGENT_MARK.fullmatch(name) is not None


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
