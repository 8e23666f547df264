"""A fork while other threads use the pool: the child returns and may open the pool itself, the parent goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from long_form import LONG
from store.pools import inside, run, space_in

from store_client import EmbeddedStore, Put
from store_client.testing import chain, get_page, page_bytes, parents_of, put_chain, put_pages

pytestmark = pytest.mark.slow

FORKS, ENDS = (200, 20) if LONG else (50, 8)
CHILD_LIMIT_S = 120


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
        space = space_in(store, name)
        turn = 0
        while not stop.is_set():
            turn += 1
            keys = chain(f"{name} {turn % 40}", 4)
            put_pages(space, keys, pages, parents=parents_of(keys), deadline_s=60)
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


@pytest.mark.long
def test_a_fork_returns_in_the_child_whatever_other_threads_do(store, space):
    with busy_threads(store):
        for _ in range(FORKS):
            time.sleep(0.003)
            assert in_child(lambda: True) == 0
    assert put_chain(space, chain("after", 2)) == [Put.STORED] * 2


def test_a_child_opens_the_pool_itself_while_its_parent_goes_on(pool, store, space):
    """What it inherited misses and fails."""
    keys, there = chain("a", 2), chain("there", 2)
    put_chain(space, there)

    def use() -> bool:
        if space.lookup(there).pages or put_chain(space, keys) != [Put.FAILED] * 2:
            return False
        with EmbeddedStore(pool) as own:
            mine = space_in(own, f"child {os.getpid()}")
            return put_chain(mine, keys) == [Put.STORED] * 2 and get_page(mine, keys[1]) is not None

    assert in_child(use) == 0 and space.lookup(there).pages == 2
    with busy_threads(store):
        assert [in_child(use) for _ in range(20)] == [0] * 20
    assert put_chain(space, chain("after", 2)) == [Put.STORED] * 2


@pytest.mark.long
def test_a_child_that_ends_like_any_program_does_not_hang(pool, store):
    code = """
        import threading
        def work():
            for turn in range(10 ** 9):
                put_chain(space, chain(str(turn % 50), 4), 4096)
        threading.Thread(target=work, daemon=True).start()
        for _ in range(int(sys.argv[2])):
            child = os.fork()
            if child == 0:
                import signal
                signal.alarm(120)
                sys.exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status: os._exit(7)
        os._exit(0)
    """
    assert run(code, pool, str(ENDS)).returncode == 0


def test_a_child_drops_no_lock_of_its_parent(pool, store, space):
    """flock belongs to the open file: a child that unlocked it would let a third process write beside its parent."""

    def open_elsewhere(deadline_s: float) -> bool:
        with EmbeddedStore(pool, deadline_s=deadline_s):
            return True

    with inside(store).writer.locked(time.monotonic() + 60):
        assert in_child(lambda: True) == 0
        assert in_child(lambda: open_elsewhere(0.2)) == 1, "a child takes the lock that its parent holds"
    assert in_child(lambda: open_elsewhere(60)) == 0
    assert put_chain(space, chain("a", 1)) == [Put.STORED]


def test_a_fork_within_a_put_publishes_in_the_parent_alone(space):
    keys = chain("a", 3)
    children = []

    def fill(i, view):
        view[:] = page_bytes(keys[i])
        if i == 1 and not children:
            children.append(os.fork())

    outcome = space.write(keys, fill, nbytes=65536, parents=parents_of(keys), deadline_s=60)
    if children[0] == 0:
        os._exit(0 if outcome == [Put.FAILED] * 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert outcome == [Put.STORED] * 3
    assert get_page(space, keys[2]) is not None


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_way_of_multiprocessing_has_a_pool_of_its_own(pool, method):
    script = pool.with_name("main.py")
    script.write_text("""
import multiprocessing, sys
from store_client import EmbeddedStore, Put
from store_client.testing import *
def work(path, name):
    with EmbeddedStore(path) as store:
        right = put_chain(store.space(namespace(name), SHARD), chain('a', 2), 4096) == [Put.STORED] * 2
    sys.exit(0 if right else 1)
if __name__ == '__main__':
    context = multiprocessing.get_context(sys.argv[2])
    with EmbeddedStore(sys.argv[1], 4 << 20) as store:
        for turn in range(3):
            child = context.Process(target=work, args=(sys.argv[1], f'{turn}'))
            child.start()
            child.join(120)
            if child.exitcode != 0: child.kill(); sys.exit(1)
        sys.exit(0 if store.stats().stored_pages == 6 else 2)
""")
    assert subprocess.run([sys.executable, str(script), str(pool), method], check=False).returncode == 0
