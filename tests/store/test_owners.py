"""The files by which processes of a pool prove that they live: deleted by others, left by the dead, in the way."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store.audit import audit
from store.test_opening import CAPACITY, data_folder, until

from store_client import EmbeddedStore, Put
from store_client.embedded import pool_users, registry
from store_client.embedded.folder import remove_pool
from store_client.embedded.ledger import Ledger
from store_client.embedded.writer import PutPages
from store_client.testing import SHARD, chain, namespace, put_chain

KILLED_WITHIN_A_PUT = (
    "import os, sys\n"
    "from pathlib import Path\n"
    "from store_client import EmbeddedStore\n"
    "from store_client.testing import *\n"
    "keys = chain('killed', 3)\n"
    "def fill(i, view):\n"
    "    for file in Path(sys.argv[1]).glob('*/owners/*'):\n"
    "        file.unlink()\n"
    "    os._exit(9)\n"
    "space = EmbeddedStore(sys.argv[1]).space(namespace(), SHARD)\n"
    "space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=30)\n"
)


KILLED_AFTER_A_FORK = (
    "import os, sys, time\n"
    "from store_client import EmbeddedStore\n"
    "from store_client.testing import *\n"
    "keys = chain('killed', 3)\n"
    "def fill(i, view):\n"
    "    child = os.fork()\n"
    "    if child:\n"
    "        print(child, flush=True)\n"
    "        os._exit(9)\n"
    "    os.close(1)\n"
    "    time.sleep(600)\n"
    "space = EmbeddedStore(sys.argv[1]).space(namespace(), SHARD)\n"
    "space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=30)\n"
)


def reserved(store: EmbeddedStore) -> int:
    opened = store._handle._pool
    assert opened is not None
    with opened._ledger.peek() as draft:
        return len(draft.reservations())


def test_space_of_a_dead_writer_without_a_file_comes_back(pool: Path) -> None:
    """A file that is gone proves nobody's death; that nobody else has the arena open does."""
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(store.space(namespace(), SHARD), chain("a", 2))
    assert subprocess.run([sys.executable, "-c", KILLED_WITHIN_A_PUT, str(pool)], check=False).returncode == 9
    with EmbeddedStore(pool) as store:
        assert reserved(store) == 0
        assert store.space(namespace(), SHARD).lookup(chain("a", 2)).pages == 2
        audit(store)


def test_a_forked_child_does_not_keep_its_dead_parent_alive(pool: Path) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        put_chain(store.space(namespace(), SHARD), chain("a", 2))
        command = [sys.executable, "-c", KILLED_AFTER_A_FORK, str(pool)]
        child = int(subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True).stdout)
        try:
            opened = store._handle._pool
            assert opened is not None
            assert reserved(store) == 1

            def is_reclaimed() -> bool:
                with opened.writer.locked(time.monotonic() + 5):
                    opened.writer._reclaim()
                return reserved(store) == 0

            assert until(is_reclaimed)
            assert pool_users(pool) == []
            audit(store)
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_folder_of_the_owners_comes_back_and_no_page_is_lost(pool: Path) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, chain("a", 2))
        before = data_folder(pool)
        shutil.rmtree(before / "owners")
        assert until(lambda: space.lookup(chain("a", 2)).pages == 2 and (before / "owners").is_dir())
        assert len(os.listdir(before / "owners")) == 1
        assert store.stats().pages == 2
    with EmbeddedStore(pool) as store:
        assert data_folder(pool) == before
        assert store.space(namespace(), SHARD).lookup(chain("a", 2)).pages == 2


def test_a_file_that_was_being_made_again_is_removed_with_the_pool(pool: Path) -> None:
    """What a process leaves that is killed while it makes its file again."""
    with EmbeddedStore(pool, CAPACITY):
        (data_folder(pool) / "owners" / ("0" * 32 + ".new")).write_bytes(b"")
    assert remove_pool(pool) == []
    assert not pool.exists()


def test_closing_does_not_raise_where_a_file_cannot_be_deleted(pool: Path) -> None:
    store = EmbeddedStore(pool, CAPACITY)
    owners = data_folder(pool) / "owners"
    shutil.rmtree(owners)
    owners.write_bytes(b"")
    files = len(os.listdir("/proc/self/fd"))
    store.close()
    assert len(os.listdir("/proc/self/fd")) < files
    with EmbeddedStore(pool, CAPACITY) as again:
        assert put_chain(again.space(namespace(), SHARD), chain("a", 2)) == [Put.STORED] * 2


def test_space_that_is_given_up_while_other_space_is_given_back_is_not_forgotten(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put may fail in one thread while another one commits what it gives back."""
    with EmbeddedStore(pool, CAPACITY) as store:
        opened = store._handle._pool
        assert opened is not None
        writer, keys = opened.writer, chain("a", 2)

        def reserve(key: bytes) -> object:
            return writer.reserve(PutPages(namespace(), SHARD, [key], [None], 65536), time.monotonic() + 5).reservation

        first, second = reserve(keys[0]), reserve(keys[1])
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
        writer.abandon(first)  # type: ignore[arg-type]
        for _ in range(2):
            with writer.locked(time.monotonic() + 5):
                pass
        assert reserved(store) == 0


def test_two_threads_that_miss_the_file_make_one(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        opened = store._handle._pool
        assert opened is not None
        owners = opened._owners
        owners._path.unlink()
        files = len(os.listdir("/proc/self/fd"))
        make, threads = owners._make, []

        def interrupted(path: Path) -> object:
            made = make(path)
            if not threads:
                threads.append(threading.Thread(target=owners.restore))
                threads[0].start()
                threads[0].join(0.5)
            return made

        monkeypatch.setattr(owners, "_make", interrupted)
        assert owners.restore()
        threads[0].join(10)
        assert len(os.listdir("/proc/self/fd")) == files
        assert os.path.samestat(os.fstat(owners._fd), os.stat(owners._path))


def test_a_pool_that_was_replaced_is_closed_once_the_last_call_in_it_ends(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_CLOSE_WAIT_S", 0.1)
    keys = chain("a", 1)
    replaced, ended = threading.Event(), threading.Event()
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        put_chain(space, keys)
        old = store._handle._pool
        assert old is not None

        def consume(i: int, page: object) -> None:
            replaced.set()
            ended.wait(60)

        reader = threading.Thread(target=space.read, args=(keys, consume), kwargs={"nbytes": 65536})
        reader.start()
        assert replaced.wait(10)
        remove_pool(pool)
        assert until(lambda: space.lookup(keys).pages == 0 and store._handle._pool is not old)
        time.sleep(0.5)
        assert old.arena._fd >= 0
        ended.set()
        reader.join()
        assert until(lambda: old.arena._fd < 0)
