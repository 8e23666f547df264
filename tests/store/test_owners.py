"""The files by which processes of a pool prove that they live: deleted by others, left by the dead, in the way."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from simulated.waiting import wait_for
from store.audit import audit
from store.pools import CAPACITY, data_folder, fill, inside, run, space_in

from store_client import EmbeddedStore, Put
from store_client.embedded import owners as pool_owners
from store_client.embedded import pool_users, registry
from store_client.embedded.folder import remove_pool
from store_client.embedded.ledger import Ledger
from store_client.embedded.put import PutPages
from store_client.testing import SHARD, chain, namespace, put_chain


def reserved(store):
    with inside(store)._ledger.peek() as draft:
        return len(draft.reservations())


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_space_of_a_dead_writer_without_a_file_comes_back(pool):
    """A file that is gone proves nobody's death; that nobody else has the arena open does."""
    keys = fill(pool, 2)
    code = """
        keys = chain('killed', 3)
        def fill(i, view):
            for file in Path(sys.argv[1]).glob('*/owners/*'):
                file.unlink()
            os._exit(9)
        space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=60)
    """
    assert run(code, pool).returncode == 9
    with EmbeddedStore(pool) as store:
        assert reserved(store) == 0
        assert space_in(store).lookup(keys).pages == 2
        audit(store)


def test_a_forked_child_does_not_keep_its_dead_parent_alive(pool, store, space):
    put_chain(space, chain("a", 2))
    code = """
        keys = chain('killed', 3)
        def fill(i, view):
            child = os.fork()
            if child:
                print(child, flush=True)
                os._exit(9)
            os.close(1)
            time.sleep(600)
        space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=60)
    """
    child = int(run(code, pool).stdout)
    try:
        assert reserved(store) == 1

        def is_reclaimed() -> bool:
            writer = inside(store).writer
            with writer.locked(time.monotonic() + 60):
                writer._reclaim()
            return reserved(store) == 0

        wait_for(is_reclaimed)
        assert pool_users(pool) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_folder_of_the_owners_comes_back_and_no_page_is_lost(pool):
    keys = chain("a", 2)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = space_in(store)
        put_chain(space, keys)
        before = data_folder(pool)
        shutil.rmtree(before / "owners")
        wait_for(lambda: space.lookup(keys).pages == 2 and (before / "owners").is_dir())
        wait_for(lambda: len(os.listdir(before / "owners")) == 1)
        assert store.stats().pages == 2
    with EmbeddedStore(pool) as store:
        assert data_folder(pool) == before
        assert space_in(store).lookup(keys).pages == 2


def test_a_file_that_was_being_made_again_is_removed_with_the_pool(pool):
    """What a process leaves that is killed while it makes its file again."""
    with EmbeddedStore(pool, CAPACITY):
        (data_folder(pool) / "owners" / ("0" * 32 + ".new")).write_bytes(b"")
    assert remove_pool(pool) == []
    assert not pool.exists()


def test_closing_does_not_raise_where_a_file_cannot_be_deleted(pool):
    store = EmbeddedStore(pool, CAPACITY)
    owners = data_folder(pool) / "owners"
    shutil.rmtree(owners)
    owners.write_bytes(b"")
    files = open_files()
    store.close()
    assert open_files() < files
    with EmbeddedStore(pool, CAPACITY) as again:
        assert put_chain(space_in(again), chain("a", 2)) == [Put.STORED] * 2


def test_space_that_is_given_up_while_other_space_is_given_back_is_not_forgotten(store, monkeypatch):
    """A put may fail in one thread while another one commits what it gives back."""
    writer = inside(store).writer

    def reserve(key: bytes) -> object:
        return writer.reserve(PutPages(namespace(), SHARD, [key], [None], 65536), time.monotonic() + 60).reservation

    first, second = map(reserve, chain("a", 2))
    transaction = Ledger.transaction
    late = [second]

    @contextmanager
    def interrupted(ledger: Ledger) -> Iterator[object]:
        with transaction(ledger) as draft:
            yield draft
        if late:
            thread = threading.Thread(target=writer.abandon, args=(late.pop(),))
            thread.start()
            thread.join()

    monkeypatch.setattr(Ledger, "transaction", interrupted)
    writer.abandon(first)
    for _ in range(2):
        with writer.locked(time.monotonic() + 60):
            pass
    assert reserved(store) == 0


def test_two_threads_that_miss_the_file_make_one(store, monkeypatch):
    opened = inside(store)
    owners = opened._owners
    owners._path.unlink()
    files = open_files()
    make, threads = owners._make, []

    def interrupted(path: object) -> object:
        made = make(path)
        if not threads:
            threads.append(threading.Thread(target=owners.restore))
            threads[0].start()
            threads[0].join(0.5)
        return made

    monkeypatch.setattr(owners, "_make", interrupted)
    assert owners.restore()
    threads[0].join(60)
    assert open_files() == files
    assert os.path.samestat(os.fstat(owners._fd), os.stat(owners._path))


def test_a_pool_that_was_replaced_is_closed_once_the_last_call_in_it_ends(pool, store, space, monkeypatch):
    monkeypatch.setattr(registry, "_CLOSE_WAIT_S", 0.1)
    keys = chain("a", 1)
    replaced, ended = threading.Event(), threading.Event()
    put_chain(space, keys)
    old = inside(store)

    def consume(i: int, page: object) -> None:
        replaced.set()
        assert ended.wait(120)

    reader = threading.Thread(target=space.read, args=(keys, consume), kwargs={"nbytes": 65536})
    reader.start()
    assert replaced.wait(60)
    remove_pool(pool)
    wait_for(lambda: space.lookup(keys).pages == 0 and store._handle._pool is not old)
    time.sleep(0.5)
    assert old.arena._fd >= 0
    ended.set()
    reader.join()
    wait_for(lambda: old.arena._fd < 0)


WITH_A_DEVICE = """
    class Locks:
        def lock(self, address, nbytes):
            return True
        def unlock(self, address):
            pass
    def fill(i, view):
        os._exit(9)
    store.lock_memory(Locks())
    space.write(chain('killed', 3), fill, nbytes=65536, parents=parents_of(chain('killed', 3)), deadline_s=60)
"""


def test_space_of_a_writer_that_was_killed_goes_to_others_once_its_device_has_stopped(pool, monkeypatch):
    """A process is gone for others a moment before its device is: what that still writes must meet nobody's page."""
    monkeypatch.setattr(pool_owners, "_DEVICE_STOPS_S", 3600.0)
    monkeypatch.setattr("store_client.embedded.writer._RECLAIM_PERIOD_S", 0.0)
    with EmbeddedStore(pool, CAPACITY) as store:
        assert run(WITH_A_DEVICE.replace("store.lock_memory(Locks())", ""), pool).returncode == 9
        assert run(WITH_A_DEVICE, pool).returncode == 9
        for _ in range(3):
            inside(store).writer.settle(time.monotonic() + 60)
        assert reserved(store) == 1, "that of the one without a device is back"
    with EmbeddedStore(pool) as alone:
        assert reserved(alone) == 1, "nor does it come back to one that is alone"
        assert put_chain(space_in(alone), chain("a", CAPACITY // 65536)).count(Put.FAILED) >= 3
        monkeypatch.setattr(pool_owners, "_DEVICE_STOPS_S", 0.0)
        inside(alone).writer.settle(time.monotonic() + 60)
        assert reserved(alone) == 0
        audit(alone)


def test_that_a_process_has_a_device_outlasts_its_file(store):
    owners = inside(store)._owners
    owners.counters.has_device()
    owners._path.unlink()
    assert owners.restore()
    assert any(owners._path.read_bytes()[4096 + 8 * pool_owners._DEVICE_AT :])
    owners.counters.take()
    assert any(owners._path.read_bytes()[4096 + 8 * pool_owners._DEVICE_AT :])
