"""The arena page-locked for a device: what is locked when, and that no page of the file is another one meanwhile."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from store.pools import CAPACITY, inside, program, run, running, space_in, works

from store_client import EmbeddedStore
from store_client.embedded import arena as arenas
from store_client.embedded import locked_memory, memory_limit, owners
from store_client.testing import PAGE_NBYTES, chain, get_page, page_bytes, put_chain

LIMIT_S = 120.0
CHUNK = 1 << 20


def wait_for(condition, what="it"):
    give_up_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_s, f"{what} did not come true in {LIMIT_S:g} s"
        time.sleep(0.005)


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < stop:
            return line.endswith("/arena") or "/arena (deleted)" in line
    return False


class Locks:
    """Locks nothing, and notes what it was told and whether that was in order."""

    def __init__(self, takes=1 << 30):
        self.takes = takes
        """How many pieces it locks before it refuses one."""
        self.locked, self.asked, self.wrong, self.unlocked = {}, [], [], []
        self.may_unlock = threading.Event()
        self.may_unlock.set()
        self.pid = os.getpid()

    def _check(self, right, what):
        if not right:
            self.wrong.append(what)

    def lock(self, address, nbytes):
        self.asked.append(nbytes)
        self._check(os.getpid() == self.pid, "locked in a child")
        self._check(address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0 < nbytes, "not whole pages")
        self._check(is_mapped(address) and is_mapped(address + nbytes - 1), "locked what is no arena")
        if len(self.locked) >= self.takes:
            return False
        self.locked[address] = nbytes
        return True

    def unlock(self, address):
        self.may_unlock.wait(LIMIT_S)
        self._check(os.getpid() == self.pid, "unlocked in a child")
        self._check(is_mapped(address), "unlocked what is not mapped any more")
        self._check(self.locked.pop(address, None), "unlocked twice")
        self.unlocked.append(address)

    @property
    def nbytes(self):
        return sum(self.locked.values())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(locked_memory, "CHUNK_NBYTES", CHUNK)
    monkeypatch.setattr(locked_memory, "_LOOK_PERIOD_S", 0.005)


@pytest.fixture
def locks():
    locks = Locks()
    yield locks
    assert not locks.wrong


@pytest.fixture
def growing(pool, monkeypatch):
    """An empty pool that grows a MiB at a time."""
    monkeypatch.setattr("store_client.embedded.allocator._GROWTH", (1 << 20) // arenas.GRANULE)
    with EmbeddedStore(pool, CAPACITY) as store:
        yield store


def put(store, nbytes, name="a"):
    put_chain(space_in(store), chain(name, nbytes // PAGE_NBYTES))


def test_whole_chunks_are_locked_as_they_fill_and_the_rest_when_the_pool_is_full(pool, monkeypatch, locks):
    monkeypatch.setattr("store_client.embedded.allocator._GROWTH", (1 << 19) // arenas.GRANULE)
    capacity = CAPACITY + CHUNK // 2
    with EmbeddedStore(pool, capacity) as store:
        store.lock_memory(locks)
        put(store, 3 * CHUNK + CHUNK // 2)
        wait_for(lambda: locks.nbytes >= 3 * CHUNK)
        secured = inside(store).writer.secured(time.monotonic() + LIMIT_S) * arenas.GRANULE
        assert secured % CHUNK and locks.nbytes == secured - secured % CHUNK, "half a chunk is there and not locked"
        put(store, capacity, "b")
        wait_for(lambda: locks.nbytes == capacity)
        assert locks.asked == [CHUNK] * 8 + [CHUNK // 2]
        start = min(locks.locked)
        assert inside(store).arena.memory.ctypes.data == start
    assert not locks.locked


def test_what_was_secured_ahead_is_locked_once_the_pool_has_grown_into_it(pool, monkeypatch, locks):
    """The file changes no more then."""
    monkeypatch.setattr("store_client.embedded.allocator._GROWTH", CHUNK // arenas.GRANULE)
    with EmbeddedStore(pool, 16 * CHUNK) as store:
        store.lock_memory(locks)
        put(store, 15 * CHUNK)
        arena = inside(store).arena
        wait_for(lambda: arena.secured_nbytes == 16 * CHUNK, "that all is secured")
        wait_for(lambda: arena._locked[0]._size == arena.size() and locks.nbytes == 15 * CHUNK)
        put(store, CHUNK, "b")
        wait_for(lambda: locks.nbytes == 16 * CHUNK)


def test_what_another_process_secured_is_locked(growing, locks):
    growing.lock_memory(locks)
    assert locks.nbytes == 0
    run("put_chain(space, chain('a', 64))", growing.path)
    wait_for(lambda: locks.nbytes >= 4 * CHUNK)


def test_nothing_is_locked_that_the_file_system_has_not_given(growing, locks):
    """To lock a hole would take memory for it, and fail where there is none."""
    growing.lock_memory(locks)
    put(growing, CHUNK)
    wait_for(lambda: locks.nbytes)
    arena = next(growing.path.glob("*/arena"))
    assert locks.nbytes <= arena.stat().st_blocks * 512 < CAPACITY == arena.stat().st_size


def test_a_pool_that_stays_locked_by_another_is_looked_at_again(growing, locks, monkeypatch):
    monkeypatch.setattr("store_client.embedded.pool._SECURED_DEADLINE_S", 0.01)
    put(growing, 2 * CHUNK)
    lock = inside(growing)._lock
    lock.acquire(time.monotonic() + LIMIT_S)
    try:
        growing.lock_memory(locks)
        time.sleep(0.1)
        assert not locks.locked
    finally:
        lock.release()
    wait_for(lambda: locks.nbytes >= 2 * CHUNK)


@pytest.mark.parametrize("takes", [0, 2])
def test_after_a_refusal_nothing_more_is_tried(growing, takes):
    locks = Locks(takes)
    growing.lock_memory(locks)
    put(growing, CAPACITY)
    wait_for(lambda: len(locks.asked) > takes)
    put(growing, CAPACITY, "b")
    time.sleep(0.05)
    assert (len(locks.locked), locks.asked) == (takes, [CHUNK] * (takes + 1))
    assert works(growing)
    growing.close()
    assert not locks.locked and not locks.wrong


def test_a_fault_of_the_locks_unlocks_nothing_that_is_in_use(growing):
    class Broken(Locks):
        def lock(self, address, nbytes):
            if len(self.locked) == 2:
                raise RuntimeError("broken")
            return super().lock(address, nbytes)

    locks = Broken()
    put(growing, CAPACITY)
    growing.lock_memory(locks)
    wait_for(lambda: len(locks.locked) == 2)
    time.sleep(0.05)
    assert len(locks.locked) == 2 and works(growing)
    growing.close()
    assert not locks.locked and not locks.wrong


def test_a_larger_pool_is_locked_anew_and_the_former_mapping_as_long_as_somebody_reads_there(growing, locks):
    put(growing, CAPACITY)
    growing.lock_memory(locks)
    wait_for(lambda: locks.nbytes == CAPACITY)
    former = set(locks.locked)
    keys = chain("a", 1)
    reading, done = threading.Event(), threading.Event()

    def consume(_i, view):
        reading.set()
        assert done.wait(LIMIT_S)

    space = space_in(growing)
    put_chain(space, keys)
    reader = threading.Thread(target=lambda: space.read(keys, consume, nbytes=PAGE_NBYTES))
    reader.start()
    assert reading.wait(LIMIT_S)
    with EmbeddedStore(growing.path, 2 * CAPACITY):
        put(growing, 2 * CAPACITY, "b")
        wait_for(lambda: locks.nbytes == 3 * CAPACITY)
    time.sleep(0.05)
    assert former <= set(locks.locked), "a device may be reading there"
    done.set()
    reader.join(LIMIT_S)
    wait_for(lambda: former.isdisjoint(locks.locked))
    assert locks.nbytes == 2 * CAPACITY


def test_a_pool_that_takes_the_place_of_another_is_locked_and_the_other_unlocked(growing, locks):
    put(growing, CAPACITY)
    growing.lock_memory(locks)
    wait_for(lambda: locks.nbytes == CAPACITY)
    former = set(locks.locked)
    next(growing.path.glob("*/arena")).unlink()

    def renewed():
        return works(growing) and former.isdisjoint(locks.locked) and locks.nbytes

    wait_for(renewed)
    assert set(locks.unlocked) == former


def test_the_same_locks_given_twice_count_once_and_a_closed_store_locks_nothing(growing, locks):
    put(growing, CAPACITY)
    with EmbeddedStore(growing.path) as other:
        other.lock_memory(locks)
        growing.lock_memory(locks)
        wait_for(lambda: locks.nbytes == CAPACITY)
    other.lock_memory(Locks(0))
    assert locks.nbytes == CAPACITY, "the pool is open still"
    assert len(locks.asked) == CAPACITY // CHUNK


def test_a_pool_on_a_disk_is_not_locked(growing, locks, monkeypatch):
    monkeypatch.setattr(memory_limit, "_TMPFS", 1)
    put(growing, CAPACITY)
    growing.lock_memory(locks)
    time.sleep(0.05)
    assert not locks.asked and works(growing)


def test_a_child_neither_unlocks_nor_keeps_the_pool_in_use(growing, locks):
    put(growing, CAPACITY)
    growing.lock_memory(locks)
    wait_for(lambda: locks.nbytes == CAPACITY)
    held = dict(locks.locked)
    arena = next(growing.path.glob("*/arena"))
    go, child_goes = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT_S))
        right = False
        try:
            growing.close()
            right = locks.locked == held and not locks.unlocked
            os.close(child_goes)
            os.read(go, 1)  # until the parent has closed the pool
            fd = os.open(arena, os.O_RDWR)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            right = False
        finally:
            os._exit(0 if right else 1)
    os.close(go)
    time.sleep(0.02)
    assert locks.locked == held
    growing.close()
    assert not locks.locked
    os.close(child_goes)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# Pages of the file that are punched out, and what a device would read then

libc = ctypes.CDLL(None, use_errno=True)


class Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Pinned:
    """The first page at an address, held as a device's driver holds it: the page itself, not its place in a file."""

    def __init__(self, address):
        self._read, self._write = os.pipe()
        vector = Vector(address, mmap.PAGESIZE)
        if libc.vmsplice(self._write, ctypes.byref(vector), 1, 0) != mmap.PAGESIZE:
            pytest.skip(f"NOT TESTED: no vmsplice here ({os.strerror(ctypes.get_errno())})")

    def copy(self):
        """What a device copies."""
        try:
            return os.read(self._read, mmap.PAGESIZE)
        finally:
            os.close(self._read)
            os.close(self._write)


def test_memory_that_is_still_locked_is_not_punched_out_though_the_pool_was_closed(pool, monkeypatch):
    """A driver that takes its time to unlock holds the file, and nobody else."""
    monkeypatch.setattr(arenas, "_UNLOCK_WAIT_S", 0.01)
    locks, keys = Locks(), chain("a", 32)
    store = EmbeddedStore(pool, CAPACITY)
    put_chain(space_in(store), keys)
    store.lock_memory(locks)
    wait_for(lambda: locks.nbytes == CAPACITY)
    memory = inside(store).arena.memory
    space, at = space_in(store), []
    space.read(keys[-1:], lambda _i, view: at.append(view.ctypes.data), nbytes=PAGE_NBYTES)
    there = memory[at[0] - memory.ctypes.data :][: mmap.PAGESIZE]
    right = page_bytes(keys[-1])[: mmap.PAGESIZE].tobytes()
    before, after = Pinned(at[0]), Pinned(at[0])
    arena = next(pool.glob("*/arena"))
    locks.may_unlock.clear()
    store.close()
    smaller = f"EmbeddedStore(sys.argv[1], {CAPACITY // 8}).close()"
    run(smaller, pool, opened=False)
    assert arena.stat().st_blocks * 512 >= CAPACITY
    assert there.tobytes() == right == before.copy()
    locks.may_unlock.set()
    wait_for(lambda: not locks.locked and is_free(arena), "that nobody has the file in use")
    run(smaller, pool, opened=False)
    assert arena.stat().st_blocks * 512 <= CAPACITY // 4
    assert there.tobytes() != right == after.copy(), "a page that was punched out is not the file's any more"
    assert not locks.wrong


def is_free(arena):
    fd = os.open(arena, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


LOCKER = f"""
from store_client.embedded import locked_memory
locked_memory._LOOK_PERIOD_S = 0.005

class Locks:
    nbytes = 0

    def lock(self, address, nbytes):
        self.nbytes += nbytes
        return True

    def unlock(self, address):
        raise SystemExit("nobody unlocks here")

put_chain(space, chain('a', 64))
locks = Locks()
store.lock_memory(locks)
while locks.nbytes < {CAPACITY}:
    time.sleep(0.005)
print('locked', flush=True)
sys.stdin.read()
"""


def test_what_a_process_locked_is_punched_by_no_other_until_it_is_gone(pool):
    EmbeddedStore(pool, CAPACITY).close()
    arena = next(pool.glob("*/arena"))
    smaller = f"EmbeddedStore(sys.argv[1], {CAPACITY // 8}).close()"
    with running(LOCKER, pool) as process:
        run(smaller, pool, opened=False)
        assert arena.stat().st_blocks * 512 >= CAPACITY, "its device reads there"
        process.kill()
        process.wait(LIMIT_S)
    run(smaller, pool, opened=False)
    assert arena.stat().st_blocks * 512 <= CAPACITY // 4
    with EmbeddedStore(pool) as store:
        assert works(store) and not store.verify().corrupt


KILLED_IN_SETTLE = """
class Locks:
    def lock(self, address, nbytes):
        return True

    def unlock(self, address):
        raise SystemExit("nobody unlocks here")

import store_client.embedded.putting as putting
putting._BATCH_NBYTES = 4 * PAGE_NBYTES
store.lock_memory(Locks())
places = []

def settle(count):
    print(*[place - store.memory.ctypes.data for place in places], flush=True)
    sys.stdin.read()

def fill(i, view):
    places.append(view.ctypes.data)

keys = chain('killed', 8)
space.write(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=60, settle=settle)
"""


@pytest.mark.parametrize("waits", [True, False], ids=["", "control"])
def test_what_the_device_of_a_killed_process_still_writes_meets_nobodys_page(pool, monkeypatch, waits):
    monkeypatch.setattr(owners, "_DEVICE_STOPS_S", 3600.0 if waits else 0.0)
    monkeypatch.setattr("store_client.embedded.writer._RECLAIM_PERIOD_S", 0.0)
    with EmbeddedStore(pool, CAPACITY) as store:
        command = program(KILLED_IN_SETTLE, pool)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            places = [int(place) for place in process.stdout.readline().split()]
            process.kill()
            process.wait(LIMIT_S)
        assert len(places) == 6, "one batch, and half of the next"
        for name in ("b", "c"):
            put(store, CAPACITY, name)
        memory = store.memory
        for place in places:  # as its device does
            memory[place : place + PAGE_NBYTES] = 7
        report = store.verify()
        assert report.pages + 2 * 4 >= CAPACITY // PAGE_NBYTES
        assert (report.corrupt == 0) == waits


def test_a_page_is_right_after_a_shrink_and_growth_under_locks(growing, locks):
    """What is locked stays the file's page when the capacity goes down and up again."""
    growing.lock_memory(locks)
    put(growing, CAPACITY)
    wait_for(lambda: locks.nbytes == CAPACITY)
    arena = inside(growing).arena
    pinned = Pinned(arena.memory.ctypes.data + CAPACITY - mmap.PAGESIZE)
    run(f"EmbeddedStore(sys.argv[1], {CHUNK}).close()", growing.path, opened=False)
    run(f"EmbeddedStore(sys.argv[1], {CAPACITY}).close()", growing.path, opened=False)
    put(growing, CAPACITY, "b")
    last = arena.memory[CAPACITY - mmap.PAGESIZE : CAPACITY].copy()
    assert last.tobytes() == pinned.copy()
    assert locks.nbytes == CAPACITY and len(locks.asked) == CAPACITY // CHUNK
    assert not [
        key
        for key in chain("b", 8)
        if (page := get_page(space_in(growing), key)) is not None and not np.array_equal(page, page_bytes(key))
    ]
