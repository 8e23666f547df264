"""A fork while other threads use the pool: the child returns and may open the pool itself, the parent goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store.audit import audit

from store_client import EmbeddedStore, Put
from store_client.testing import SHARD, chain, get_page, namespace, page_bytes, parents_of, put_chain, put_pages

FORKS = 200
CAPACITY = 4 << 20
CHILD_LIMIT_S = 60


def in_child(act: Callable[[], bool]) -> int:
    """The exit status of a forked child: 0 where `act` answers True; killed by SIGALRM where it never returns."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_LIMIT_S)
        right = False
        try:
            right = act()
        finally:
            os._exit(0 if right else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def busy_threads(store: EmbeddedStore) -> Iterator[None]:
    """Two threads that are inside LMDB most of the time."""
    stop = threading.Event()
    pages = [page_bytes(key, 4096) for key in chain("any", 4)]

    def work(name: str) -> None:
        space = store.space(namespace(name), SHARD)
        turn = 0
        while not stop.is_set():
            turn += 1
            keys = chain(f"{name} {turn % 40}", 4)
            put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=10)
            space.remove(keys)

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_fork_returns_in_the_child_whatever_other_threads_do(pool: Path) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        with busy_threads(store):
            for _ in range(FORKS):
                time.sleep(0.003)
                assert in_child(lambda: True) == 0
        assert put_chain(store.space(namespace(), SHARD), chain("after", 2)) == [Put.STORED] * 2
        audit(store)


def test_a_child_opens_the_pool_itself_while_its_parent_goes_on(pool: Path) -> None:
    with EmbeddedStore(pool, CAPACITY) as store:
        inherited = store.space(namespace(), SHARD)

        def use() -> bool:
            if inherited.lookup(keys).pages or put_chain(inherited, keys) != [Put.FAILED] * 2:
                return False
            with EmbeddedStore(pool) as own:
                space = own.space(namespace(f"child {os.getpid()}"), SHARD)
                return put_chain(space, keys) == [Put.STORED] * 2 and get_page(space, keys[1]) is not None

        keys = chain("a", 2)
        with busy_threads(store):
            assert [in_child(use) for _ in range(20)] == [0] * 20
        audit(store)


def test_a_child_that_ends_like_any_program_does_not_hang(pool: Path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import *\n"
        "store = EmbeddedStore(sys.argv[1], 4 << 20)\n"
        "space = store.space(namespace(), SHARD)\n"
        "def work():\n"
        "    for turn in range(10 ** 9):\n"
        "        put_chain(space, chain(str(turn % 50), 4), 4096)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "for _ in range(20):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(60)\n"
        "        sys.exit(0)\n"
        "    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "    if status: os._exit(7)\n"
        "os._exit(0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(pool)], check=False).returncode == 0


def test_a_child_drops_no_lock_of_its_parent(pool: Path) -> None:
    """flock belongs to the open file: a child that unlocked it would let a third process write beside its parent."""
    keys = chain("a", 1)
    with EmbeddedStore(pool, CAPACITY) as store:
        opened = store._handle._pool
        assert opened is not None

        def put_elsewhere() -> bool:
            with EmbeddedStore(pool, deadline_s=0.2):
                return True

        with opened.writer.locked(time.monotonic() + 5):
            assert in_child(lambda: True) == 0
            assert in_child(put_elsewhere) == 1, "a child that opens the pool takes the lock that its parent holds"
        assert in_child(put_elsewhere) == 0
        assert put_chain(store.space(namespace(), SHARD), keys) == [Put.STORED]


def test_a_fork_within_a_put_publishes_in_the_parent_alone(pool: Path) -> None:
    keys = chain("a", 3)
    with EmbeddedStore(pool, CAPACITY) as store:
        space = store.space(namespace(), SHARD)
        children = []

        def fill(i: int, view: object) -> None:
            view[:] = page_bytes(keys[i])  # type: ignore[index]
            if i == 1 and not children:
                children.append(os.fork())

        outcome = space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=5)
        if children[0] == 0:
            os._exit(0 if outcome == [Put.FAILED] * 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
        assert outcome == [Put.STORED] * 3
        assert get_page(space, keys[2]) is not None
        audit(store)


def test_nothing_is_imported_once_a_pool_is_open(pool: Path) -> None:
    """A child forked while another thread imports a module waits for ever for that import, with a lock in hand."""
    code = (
        "import sys\n"
        "from store_client import EmbeddedStore\n"
        "from store_client.testing import *\n"
        "with EmbeddedStore(sys.argv[1], 4 << 20) as store:\n"
        "    known = set(sys.modules)\n"
        "    space = store.space(namespace(), SHARD)\n"
        "    for number in range(8):\n"
        "        put_chain(space, chain(str(number), 16))\n"
        "    assert store.stats().evicted_pages and leading(space, chain('7', 16)) == 16\n"
        "    assert get_page(space, chain('7', 16)[3]) is not None and space.contains(chain('7', 16))[3]\n"
        "    assert space.remove(chain('7', 16)[8:]) == 8 and store.changes() and store.namespaces()\n"
        "    for nbytes in (2 << 20, 8 << 20):\n"
        "        with EmbeddedStore(sys.argv[1], nbytes):\n"
        "            put_chain(space, chain(str(nbytes), 16), 100_000)\n"
        "    assert store.verify().corrupt == 0 and store.clear()\n"
        "print(*sorted(set(sys.modules) - known))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(pool)], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_way_of_multiprocessing_has_a_pool_of_its_own(pool: Path, method: str) -> None:
    code = (
        "import multiprocessing, sys, threading\n"
        "from store_client import EmbeddedStore, Put\n"
        "from store_client.testing import *\n"
        "def work(path, name):\n"
        "    with EmbeddedStore(path) as store:\n"
        "        space = store.space(namespace(name), SHARD)\n"
        "        right = put_chain(space, chain('a', 2), 4096) == [Put.STORED] * 2\n"
        "    sys.exit(0 if right else 1)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context(sys.argv[2])\n"
        "    with EmbeddedStore(sys.argv[1], 4 << 20) as store:\n"
        "        for turn in range(3):\n"
        "            child = context.Process(target=work, args=(sys.argv[1], f'{turn}'))\n"
        "            child.start()\n"
        "            child.join(60)\n"
        "            if child.exitcode != 0: child.kill(); sys.exit(1)\n"
        "        sys.exit(0 if store.stats().stored_pages == 6 else 2)\n"
    )
    script = pool.with_name("main.py")
    script.write_text(code)
    assert subprocess.run([sys.executable, str(script), str(pool), method], check=False).returncode == 0
