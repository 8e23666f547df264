"""Opening a pool: each thing that can be wrong with a folder is a clear error or a clean rebuild."""

import errno
import fcntl
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from store.audit import audit

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put
from store_client.embedded import folder as pool_folder
from store_client.embedded import owners
from store_client.testing import SHARD, chain, get_page, namespace, put_chain

CAPACITY = 8 << 20
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: needs root (mount, chown)")


def fill(pool: Path, count: int = 4) -> list[bytes]:
    keys = chain("a", count)
    with EmbeddedStore(pool, CAPACITY) as store:
        assert put_chain(store.space(namespace(), SHARD), keys) == [Put.STORED] * count
    return keys


def prefix(pool: Path, keys: list[bytes], capacity: int | None = None) -> int:
    with EmbeddedStore(pool, capacity) as store:
        audit(store)
        return store.space(namespace(), SHARD).lookup(keys).pages


def data_folder(pool: Path) -> Path:
    return pool / str(json.loads((pool / "pool.json").read_text())["id"])


def edit(pool: Path, **changes: object) -> None:
    file = pool / "pool.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_pool_outlives_the_processes_that_use_it(pool: Path) -> None:
    assert prefix(pool, fill(pool)) == 4


def test_the_folder_is_private(pool: Path) -> None:
    fill(pool)
    assert pool.stat().st_mode & 0o777 == 0o700
    files = [file for file in pool.rglob("*") if file.is_file()]
    assert files and all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_a_folder_that_others_may_reach_is_refused(pool: Path) -> None:
    pool.mkdir()
    pool.chmod(0o755)
    with pytest.raises(PoolError, match=r"has mode 0755: others may reach it; `chmod 700"):
        EmbeddedStore(pool, CAPACITY)


def test_a_link_is_refused(pool: Path) -> None:
    target = pool.with_name("target")
    target.mkdir(mode=0o700)
    pool.symlink_to(target)
    with pytest.raises(PoolError, match="is not a folder of its own"):
        EmbeddedStore(pool, CAPACITY)


@as_root
def test_a_folder_of_another_user_is_refused(pool: Path) -> None:
    pool.mkdir(mode=0o700)
    os.chown(pool, 12345, 12345)
    with pytest.raises(PoolError, match="belongs to user id 12345, this process runs as 0"):
        EmbeddedStore(pool, CAPACITY)


@as_root
def test_a_read_only_file_system_is_refused(pool: Path) -> None:
    pool.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=700", "none", pool], check=True)
    try:
        with pytest.raises(PoolError, match="is read-only; set `pool`"):
            EmbeddedStore(pool, CAPACITY)
    finally:
        subprocess.run(["umount", pool], check=True)


@as_root
def test_a_file_system_that_fills_up_limits_the_pool_and_kills_nobody(pool: Path) -> None:
    pool.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "none", pool], check=True)
    try:
        with EmbeddedStore(pool, 20 << 20) as store:
            space = store.space(namespace(), SHARD)
            ballast = pool / "ballast"
            ballast.write_bytes(bytes(pool_folder.free_nbytes(pool) - (6 << 20)))
            for i in range(300):
                put_chain(space, chain(f"chain {i}", 2))
            assert space.lookup(chain("chain 299", 2)).pages == 2
            assert 0 < store.stats().used_nbytes <= 6 << 20
            assert store.verify().corrupt == 0
            audit(store)
            ballast.unlink()
            time.sleep(1.1)
            for i in range(300):
                put_chain(space, chain(f"more {i}", 2))
            assert store.stats().used_nbytes > 12 << 20
    finally:
        subprocess.run(["umount", "-l", pool], check=True)


@as_root
def test_a_file_system_too_small_for_the_capacity_is_refused(pool: Path) -> None:
    pool.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "none", pool], check=True)
    try:
        with pytest.raises(PoolError, match=r"16.0 MiB takes [0-9.]+ MiB with its index, .* has room for 8.0 MiB"):
            EmbeddedStore(pool, 16 << 20)
    finally:
        subprocess.run(["umount", pool], check=True)


@pytest.mark.parametrize("capacity, shown", [(-1, "-1 B"), (0, "0 B"), (4096, "4.0 KiB"), (1 << 60, "1024.0 PiB")])
def test_an_impossible_capacity_is_refused(pool: Path, capacity: int, shown: str) -> None:
    with pytest.raises(PoolError, match=f"capacity {shown}"):
        EmbeddedStore(pool, capacity)


def test_an_unknown_policy_is_refused(pool: Path) -> None:
    with pytest.raises(PoolError, match="eviction 'fifo' is unknown: expected one of"):
        EmbeddedStore(pool, CAPACITY, eviction="fifo")


def test_too_little_shared_memory_falls_back_to_disk_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_folder, "default_pool_path", lambda: Path("/dev/shm/mooncake-never-made"))
    monkeypatch.setattr(pool_folder, "free_nbytes", lambda folder: (64 << 20) if "shm" in str(folder) else 64 << 30)
    folder, notice = pool_folder.choose_default(None)
    assert not folder.is_relative_to("/dev/shm")
    assert notice is not None and "64.0 MiB free" in notice
    monkeypatch.setattr(pool_folder, "free_nbytes", lambda folder: 64 << 20)
    with pytest.raises(PoolError, match="no room for a pool"):
        pool_folder.choose_default(None)


def test_a_newer_format_is_refused(pool: Path) -> None:
    fill(pool)
    edit(pool, format=99)
    with pytest.raises(PoolError, match="format 99, written by a newer"):
        EmbeddedStore(pool)


@pytest.mark.parametrize(
    "damage", ["format", "boot", "pool.json", "table", "feed", "ledger", "garbled", "arena", "missing"]
)
def test_what_cannot_be_trusted_is_rebuilt_with_one_line(
    pool: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = fill(pool)
    data = data_folder(pool)
    if damage == "format":
        edit(pool, format=0)
    elif damage == "boot":
        edit(pool, boot_id="another boot")
    elif damage == "pool.json":
        (pool / "pool.json").write_text('{"format": 1, "id"')
    elif damage == "garbled":
        with open(data / "ledger" / "data.mdb", "r+b") as file:
            file.write(b"\xff" * 8192)
    elif damage == "missing":
        (data / "spaces").unlink()
    else:
        os.truncate(data / {"ledger": "ledger/data.mdb"}.get(damage, damage), 10000)
    with caplog.at_level(logging.WARNING):
        assert prefix(pool, keys) == 0
    assert len([record for record in caplog.records if "is rebuilt, empty" in record.message]) == 1
    assert prefix(pool, fill(pool)) == 4


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
@pytest.mark.parametrize(
    "name",
    [
        "pool.json", "pool.json.new", "open.lock", "table", "feed", "arena", "spaces", "ledger", "ledger/data.mdb",
        "owners",
    ],
)  # fmt: skip
def test_what_is_no_file_in_place_of_one_neither_hangs_nor_escapes(pool: Path, name: str, kind: str) -> None:
    fill(pool)
    place = (data_folder(pool) if name not in ("pool.json", "pool.json.new", "open.lock") else pool) / name
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        (place / "within").mkdir(parents=True)
    else:
        place.symlink_to("/etc/hosts")
    code = (
        "import sys\n"
        "from mooncake_connector.errors import PoolError\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import *\n"
        "try:\n"
        "    with EmbeddedStore(sys.argv[1], 8 << 20) as store:\n"
        "        put_chain(store.space(namespace(), SHARD), chain('b', 2))\n"
        "        assert store.space(namespace(), SHARD).lookup(chain('b', 2)).pages == 2\n"
        "except PoolError as error:\n"
        "    assert 'set `pool`' in str(error), error\n"
    )
    subprocess.run([sys.executable, "-c", code, pool], check=True, timeout=60)
    assert Path("/etc/hosts").exists()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("failure", ["locked", "no flock", "full", "damaged", "too large"])
def test_a_failed_opening_keeps_no_descriptor(pool: Path, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pool)
    data, capacity = data_folder(pool), None
    if failure == "locked":
        holder = os.open(data / "table", os.O_RDWR)
        fcntl.flock(holder, fcntl.LOCK_EX)
    elif failure == "no flock":
        monkeypatch.setattr(owners.Owners, "dead", lambda *arguments: os.open("/nowhere", os.O_RDONLY))
    elif failure == "full":
        monkeypatch.setattr(pool_folder, "held_nbytes", lambda pool: os.truncate(pool / "absent", 1))
        capacity = 2 * CAPACITY
    elif failure == "damaged":
        edit(pool, max_pages=7)
    else:
        capacity = 1 << 50
    gc.collect()
    gc.disable()
    try:
        before = descriptors()
        for _ in range(10):
            with pytest.raises(PoolError):
                EmbeddedStore(pool, capacity, deadline_s=0.05, rebuild=False)
        assert descriptors() == before
    finally:
        gc.enable()


@as_root
def test_a_default_folder_that_another_user_took_is_an_error_that_says_what_to_do(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pool)
    pool.parent.chmod(0o755)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mooncake_connector.errors import PoolError\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.embedded import folder\n"
        "folder.default_pool_path = lambda: Path(sys.argv[1])\n"
        "os.setuid(12345)\n"
        "try:\n"
        "    EmbeddedStore()\n"
        "except PoolError as error:\n"
        "    print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code, pool], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "belongs to user id 0, this process runs as 12345" in told and "set `pool` to a folder of your own" in told


@pytest.mark.parametrize("column", ["_words", "granules"])
def test_a_damaged_column_of_the_table_does_not_fail_puts_for_ever(pool: Path, column: str) -> None:
    """As found by damaging files at random: cells that name nothing leave no room for the names of new pages."""
    fill(pool)
    with EmbeddedStore(pool) as store:
        opened = store._handle._pool
        assert opened is not None
        array = getattr(opened.table, column)
        array[array == 0] = 7
    with EmbeddedStore(pool) as store:
        assert put_chain(store.space(namespace(), SHARD), chain("b", 4)) == [Put.STORED] * 4
        audit(store)


def test_a_pool_opens_on_a_file_system_that_is_full(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fill(pool)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with EmbeddedStore(pool) as store:
        assert get_page(store.space(namespace(), SHARD), keys[0]) is not None
    monkeypatch.undo()
    with EmbeddedStore(pool) as store:
        assert store.stats().read_pages == 1


def test_who_only_looks_does_not_rebuild(pool: Path) -> None:
    keys = fill(pool)
    before = (pool / "pool.json").read_text()
    edit(pool, boot_id="another boot")
    with pytest.raises(PoolError, match="is not used"):
        EmbeddedStore(pool, rebuild=False)
    (pool / "pool.json").unlink()
    with pytest.raises(PoolError, match=r"is not used: pool\.json is missing; the next engine"):
        EmbeddedStore(pool, rebuild=False)
    (pool / "pool.json").write_text(before)
    assert prefix(pool, keys) == len(keys)


def test_capacity_grows_and_shrinks_between_runs(pool: Path) -> None:
    keys = fill(pool, 32)
    assert prefix(pool, keys, 2 * CAPACITY) == 32
    with EmbeddedStore(pool) as store:
        assert store.stats().capacity_nbytes == 2 * CAPACITY
    with EmbeddedStore(pool, 1 << 20) as store:
        space = store.space(namespace(), SHARD)
        assert store.stats().used_nbytes <= store.stats().capacity_nbytes == 1 << 20
        audit(store)
        for i in range(50):
            put_chain(space, chain(f"b {i}", 1))
        assert store.stats().used_nbytes <= 1 << 20
        assert (data_folder(pool) / "arena").stat().st_blocks * 512 <= 1 << 20
    assert prefix(pool, keys, CAPACITY) <= 16


def test_a_capacity_far_beyond_the_index_rebuilds(pool: Path) -> None:
    keys = fill(pool)
    assert prefix(pool, keys, 1 << 30) == 0


def test_a_stopped_opener_delays_others_only_until_their_deadline(pool: Path) -> None:
    fill(pool)
    hold = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, pool / "open.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(PoolError, match=r"stayed locked for 0\.2 s"):
            EmbeddedStore(pool, deadline_s=0.2)
    finally:
        holder.kill()
        holder.wait()


def until(claim: object, seconds: float = 10) -> bool:
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        if claim():  # type: ignore[operator]
            return True
        time.sleep(0.1)
    return False


def test_a_pool_deleted_under_a_live_process_is_made_again(pool: Path) -> None:
    keys = fill(pool)
    with EmbeddedStore(pool) as store:
        space = store.space(namespace(), SHARD)
        shutil.rmtree(pool)
        get_page(space, keys[0])

        def stored_in_a_new_pool() -> bool:
            put_chain(space, keys)
            with suppress(PoolError):  # the old pool's files are gone, and the new one is not open yet
                there = (pool / "pool.json").exists() and all(space.contains(keys))
                return there and store.stats().stored_pages == 4
            return False

        assert until(stored_in_a_new_pool)
        audit(store)


def test_a_pool_replaced_under_a_live_process_is_followed(pool: Path) -> None:
    keys = fill(pool)
    with EmbeddedStore(pool) as store:
        space = store.space(namespace(), SHARD)
        assert space.lookup(keys).pages == 4
        shutil.rmtree(pool)
        other = (
            "import sys\n"
            "from store_client import EmbeddedStore\n"
            "from store_client.testing import *\n"
            "with EmbeddedStore(sys.argv[1], 8 << 20) as store:\n"
            "    put_chain(store.space(namespace(), SHARD), chain('b', 2))\n"
        )
        subprocess.run([sys.executable, "-c", other, pool], check=True)
        assert until(lambda: space.lookup(chain("b", 2)).pages == 2 and space.lookup(keys).pages == 0)


def test_two_stores_of_one_process_share_the_pool(pool: Path) -> None:
    keys = chain("a", 2)
    first, second = EmbeddedStore(pool, CAPACITY), EmbeddedStore(pool)
    put_chain(first.space(namespace(), SHARD), keys)
    first.close()
    assert second.space(namespace(), SHARD).lookup(keys).pages == 2
    second.close()


def test_a_store_that_two_threads_close_leaves_the_other_store_of_the_process_open(pool: Path) -> None:
    first, second = EmbeddedStore(pool, 16 << 20), EmbeddedStore(pool)

    class Overtaken(threading.Event):
        """Another thread closes the store while one does."""

        def set(self) -> None:
            first._closed = threading.Event()
            first.close()
            super().set()

    first._closed = Overtaken()
    first.close()
    space = second.space(namespace(), SHARD)
    assert put_chain(space, chain("a", 2), 64) == [Put.STORED, Put.STORED]
    second.close()


def test_a_forked_child_misses_until_it_opens_its_own(pool: Path) -> None:
    keys = chain("a", 2)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        child = os.fork()
        if child == 0:
            closed = space.lookup(keys).pages == 0 and put_chain(space, keys) == [Put.FAILED] * 2
            own = EmbeddedStore(pool)
            os._exit(0 if closed and own.space(namespace(), SHARD).lookup(keys).pages == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert put_chain(space, chain("b", 2)) == [Put.STORED] * 2
        audit(store)
