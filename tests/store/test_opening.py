"""Opening a pool: each thing that can be wrong with a folder is a clear error or a clean rebuild."""

import contextlib
import errno
import fcntl
import gc
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from simulated.waiting import wait_for
from store.audit import audit
from store.pools import CAPACITY, as_root, data_folder, edit, fill, garble, inside, mounted, run, running, space_in

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Put
from store_client.embedded import folder as pool_folder
from store_client.embedded import owners
from store_client.embedded.locks import FileLock, LockTimeout
from store_client.testing import chain, get_page, put_chain


def prefix(pool: Path, keys: list[bytes], capacity: int | None = None) -> int:
    """How many leading pages one finds who opens the pool."""
    with EmbeddedStore(pool, capacity) as store:
        audit(store)
        return space_in(store).lookup(keys).pages


def test_a_pool_outlives_the_processes_that_use_it(pool):
    assert prefix(pool, fill(pool)) == 4


def test_the_folder_is_private(pool):
    fill(pool)
    assert pool.stat().st_mode & 0o777 == 0o700
    files = [file for file in pool.rglob("*") if file.is_file()]
    assert files and all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_a_folder_that_others_may_reach_is_refused(pool):
    pool.mkdir()
    pool.chmod(0o755)
    with pytest.raises(PoolError, match=r"has mode 0755: others may reach it; `chmod 700"):
        EmbeddedStore(pool, CAPACITY)


def test_a_link_is_refused(pool):
    target = pool.with_name("target")
    target.mkdir(mode=0o700)
    pool.symlink_to(target)
    with pytest.raises(PoolError, match="is not a folder of its own"):
        EmbeddedStore(pool, CAPACITY)


@as_root
def test_a_folder_of_another_user_is_refused(pool):
    pool.mkdir(mode=0o700)
    os.chown(pool, 12345, 12345)
    with pytest.raises(PoolError, match="belongs to user id 12345, this process runs as 0"):
        EmbeddedStore(pool, CAPACITY)


@as_root
@pytest.mark.parametrize(
    "options, told",
    [
        ("ro", "is read-only; set `pool`"),
        ("size=8m", r"16.0 MiB takes [0-9.]+ MiB with its index, .* has room for 8.0 MiB"),
    ],
    ids=["read-only", "too small for the capacity"],
)
def test_a_file_system_that_cannot_hold_a_pool_is_refused(pool, options, told):
    with mounted(pool, options), pytest.raises(PoolError, match=told):
        EmbeddedStore(pool, 16 << 20)


@as_root
def test_a_file_system_that_fills_up_limits_the_pool_and_kills_nobody(pool):
    with mounted(pool, "size=32m"), EmbeddedStore(pool, 20 << 20) as store:
        space = space_in(store)
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


@pytest.mark.parametrize("capacity, shown", [(-1, "-1 B"), (0, "0 B"), (4096, "4.0 KiB"), (1 << 60, "1024.0 PiB")])
def test_an_impossible_capacity_is_refused(pool, capacity, shown):
    with pytest.raises(PoolError, match=f"capacity {shown}"):
        EmbeddedStore(pool, capacity)


def test_an_unknown_policy_is_refused(pool):
    with pytest.raises(PoolError, match="eviction 'fifo' is unknown: expected one of"):
        EmbeddedStore(pool, CAPACITY, eviction="fifo")


def test_too_little_shared_memory_falls_back_to_disk_and_says_so(monkeypatch):
    monkeypatch.setattr(pool_folder, "default_pool_path", lambda: Path("/dev/shm/mooncake-never-made"))
    monkeypatch.setattr(pool_folder, "free_nbytes", lambda folder: (64 << 20) if "shm" in str(folder) else 64 << 30)
    folder, notice = pool_folder.choose_default(None)
    assert not folder.is_relative_to("/dev/shm")
    assert notice is not None and "64.0 MiB free" in notice
    monkeypatch.setattr(pool_folder, "free_nbytes", lambda folder: 64 << 20)
    with pytest.raises(PoolError, match="no room for a pool"):
        pool_folder.choose_default(None)


def test_a_newer_format_is_refused(pool):
    fill(pool)
    edit(pool, format=99)
    with pytest.raises(PoolError, match="format 99, written by a newer"):
        EmbeddedStore(pool)


REBUILT = ["format", "boot", "pool.json", "no pool.json", "table", "feed", "ledger", "garbled", "arena", "no spaces"]


@pytest.mark.parametrize("damage", REBUILT)
def test_what_cannot_be_trusted_is_rebuilt_with_one_line(pool, damage, caplog):
    keys = fill(pool)
    data = data_folder(pool)
    if damage == "format":
        edit(pool, format=0)
    elif damage == "boot":
        edit(pool, boot_id="another boot")
    elif damage == "pool.json":
        (pool / "pool.json").write_text('{"format": 1, "id"')
    elif damage == "no pool.json":
        (pool / "pool.json").unlink()
    elif damage == "garbled":
        garble(data / "ledger" / "data.mdb", 0, b"\xff" * 8192)
    elif damage == "no spaces":
        (data / "spaces").unlink()
    else:
        os.truncate(data / {"ledger": "ledger/data.mdb"}.get(damage, damage), 10000)
    with caplog.at_level(logging.WARNING):
        assert prefix(pool, keys) == 0
    assert caplog.text.count("is rebuilt, empty") == (0 if damage == "no pool.json" else 1)
    assert not data.exists()
    assert prefix(pool, fill(pool)) == 4


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
@pytest.mark.parametrize(
    "name",
    [
        "pool.json", "pool.json.new", "open.lock", "table", "feed", "arena", "spaces", "ledger", "ledger/data.mdb",
        "owners",
    ],
)  # fmt: skip
def test_what_is_no_file_in_place_of_one_neither_hangs_nor_escapes(pool, name, kind):
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
    code = """
        try:
            with EmbeddedStore(sys.argv[1], 8 << 20) as store:
                space = store.space(namespace(), SHARD)
                put_chain(space, chain('b', 2))
                assert space.lookup(chain('b', 2)).pages == 2
        except PoolError as error:
            assert 'set `pool`' in str(error), error
    """
    assert run(code, pool, opened=False).returncode == 0
    assert Path("/etc/hosts").exists()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("failure", ["locked", "no flock", "full", "damaged", "too large"])
def test_a_failed_opening_keeps_no_descriptor(pool, failure, monkeypatch):
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
def test_a_default_folder_that_another_user_took_is_an_error_that_says_what_to_do(pool, monkeypatch):
    fill(pool)
    pool.parent.chmod(0o755)
    code = """
        from store_client.embedded import folder
        folder.default_pool_path = lambda: Path(sys.argv[1])
        os.setuid(12345)
        try:
            EmbeddedStore()
        except PoolError as error:
            print(error)
    """
    told = run(code, pool, opened=False).stdout
    assert "belongs to user id 0, this process runs as 12345" in told and "set `pool` to a folder of your own" in told


@pytest.mark.parametrize("column", ["_words", "granules"])
def test_a_damaged_column_of_the_table_does_not_fail_puts_for_ever(pool, column):
    """As found by damaging files at random: cells that name nothing leave no room for the names of new pages."""
    fill(pool)
    with EmbeddedStore(pool) as store:
        array = getattr(inside(store).table, column)
        array[array == 0] = 7
    with EmbeddedStore(pool) as store:
        assert put_chain(space_in(store), chain("b", 4)) == [Put.STORED] * 4
        audit(store)


def test_a_pool_opens_on_a_file_system_that_is_full(pool, monkeypatch):
    keys = fill(pool)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with EmbeddedStore(pool) as store:
        assert get_page(space_in(store), keys[0]) is not None
    monkeypatch.undo()
    with EmbeddedStore(pool) as store:
        assert store.stats().read_pages == 1


def test_who_only_looks_does_not_rebuild(pool):
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


def test_capacity_grows_and_shrinks_between_runs(pool):
    keys = fill(pool, 32)
    assert prefix(pool, keys, 2 * CAPACITY) == 32
    with EmbeddedStore(pool) as store:
        assert store.stats().capacity_nbytes == 2 * CAPACITY
    with EmbeddedStore(pool, 1 << 20) as store:
        space = space_in(store)
        assert store.stats().used_nbytes <= store.stats().capacity_nbytes == 1 << 20
        audit(store)
        for i in range(50):
            put_chain(space, chain(f"b {i}", 1))
        assert store.stats().used_nbytes <= 1 << 20
        assert (data_folder(pool) / "arena").stat().st_blocks * 512 <= 1 << 20
    assert prefix(pool, keys, CAPACITY) <= 16


def test_a_capacity_far_beyond_the_index_rebuilds(pool):
    keys = fill(pool)
    assert prefix(pool, keys, 1 << 30) == 0


def test_a_stopped_opener_delays_others_only_until_their_deadline(pool):
    fill(pool)
    hold = """
        import fcntl
        file = open(sys.argv[1], 'r+')
        fcntl.flock(file, fcntl.LOCK_EX)
        print('held', flush=True)
        sys.stdin.read()
    """
    told = pytest.raises(PoolError, match=r"stayed locked for 0\.2 s")
    with running(hold, pool / "open.lock", opened=False), told:
        EmbeddedStore(pool, deadline_s=0.2)


def test_a_lock_on_a_file_system_that_gives_a_file_other_numbers_ends_at_its_deadline(tmp_path, monkeypatch):
    lock = FileLock(tmp_path / "lock", create=True)
    looks = []

    def looks_other(lock):
        looks.append(lock)
        return len(looks) > 100_000  # at last: a thread that turns for ever is no other test's

    monkeypatch.setattr(FileLock, "_is_at_path", looks_other)
    with contextlib.closing(lock), pytest.raises(LockTimeout):
        lock.acquire(time.monotonic() + 0.2)
    monkeypatch.undo()
    lock = FileLock(tmp_path / "lock", create=True)
    with contextlib.closing(lock):
        lock.acquire(time.monotonic() + 60.0)  # nobody holds it
        lock.release()


def test_a_pool_deleted_under_a_live_process_is_made_again(pool, store, space):
    keys = chain("a", 4)
    shutil.rmtree(pool)
    get_page(space, keys[0])

    def stored_in_a_new_pool() -> bool:
        put_chain(space, keys)
        with contextlib.suppress(PoolError):  # the old pool's files are gone, and the new one is not open yet
            there = (pool / "pool.json").exists() and all(space.contains(keys))
            return there and store.stats().stored_pages == 4
        return False

    wait_for(stored_in_a_new_pool)


def test_a_pool_replaced_under_a_live_process_is_followed(pool, space):
    keys = chain("a", 4)
    put_chain(space, keys)
    shutil.rmtree(pool)
    other = """
        with EmbeddedStore(sys.argv[1], 8 << 20) as store:
            put_chain(store.space(namespace(), SHARD), chain('b', 2))
    """
    assert run(other, pool, opened=False).returncode == 0
    wait_for(lambda: space.lookup(chain("b", 2)).pages == 2 and space.lookup(keys).pages == 0)


def test_two_stores_of_one_process_share_the_pool(pool, store, space):
    keys = chain("a", 2)
    with EmbeddedStore(pool) as other:
        put_chain(space_in(other), keys)
    assert space.lookup(keys).pages == 2


def test_a_store_that_two_threads_close_leaves_the_other_store_of_the_process_open(pool, store, space):
    first = EmbeddedStore(pool)

    class Overtaken(threading.Event):
        """Another thread closes the store while one does."""

        def set(self) -> None:
            first._closed = threading.Event()
            first.close()
            super().set()

    first._closed = Overtaken()
    first.close()
    assert put_chain(space, chain("a", 2), 64) == [Put.STORED, Put.STORED]
