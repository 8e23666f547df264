"""The pool's memory page-locked through the CUDA driver, over a stand-in for it."""

from __future__ import annotations

import mmap
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from causes import forget_causes
from simulated.cuda_driver import Library
from vllm.config import KVTransferConfig

from mooncake_connector.checks import Verdict
from store_client import EmbeddedStore
from store_client.embedded import locked_memory
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain
from transfer.transports.base import Unavailable
from transfer.transports.cuda.driver import CudaError, Driver
from vllm_plugin import CONNECTOR
from vllm_plugin.device import checks
from vllm_plugin.device.page_locks import PageLocks

LIMIT_S = 120.0
CHUNK = 1 << 20
CAPACITY = 8 * CHUNK
REGISTER, UNREGISTER = "cuMemHostRegister_v2", "cuMemHostUnregister"


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def locks(library):
    forget_causes()
    return PageLocks(Driver(library), 1)


@pytest.fixture
def memory():
    return np.frombuffer(mmap.mmap(-1, 16 * mmap.PAGESIZE), dtype=np.uint8)


def test_what_is_covered_lies_in_one_piece(locks, library, memory):
    """A copy across two of them fails, though all of it is locked."""
    page, at = mmap.PAGESIZE, memory.ctypes.data
    for start, pages in ((4, 2), (0, 2), (6, 3)):
        assert locks.lock(at + start * page, pages * page)
    pieces = [(0, 2), (4, 6), (6, 9)]
    for start in range(-1, 11):
        for stop in range(start + 1, 11):
            one = any(first <= start < last and stop <= last for first, last in pieces)
            assert locks.covers(at + start * page, (stop - start) * page) == one, (start, stop)
    assert locks.nbytes == 7 * page == sum(library.registered.values())
    locks.unlock(at + 4 * page)
    assert not locks.covers(at + 4 * page, 1) and locks.covers(at, 1) and locks.covers(at + 6 * page, 1)


def test_nothing_is_covered_before_it_is_locked_nor_after_it_is_unlocked(locks, library, memory):
    at, seen = memory.ctypes.data, []
    register, unregister = locks.driver.register, locks.driver.unregister
    locks.driver.register = lambda *place: (seen.append(locks.covers(at, 1)), register(*place))
    locks.driver.unregister = lambda *place: (seen.append(locks.covers(at, 1)), unregister(*place))
    assert locks.lock(at, mmap.PAGESIZE)
    seen.append(locks.covers(at, 1))
    locks.unlock(at)
    assert (seen, library.registered) == ([False, True, False], {})


def test_a_refusal_is_the_last_try_told_once_and_counted(locks, library, memory, caplog):
    page, at = mmap.PAGESIZE, memory.ctypes.data
    assert locks.lock(at, page)
    library.fail[REGISTER] = 0
    assert not locks.lock(at + page, page) and not locks.lock(at + page, page)
    assert library.calls[REGISTER] == 2
    assert [locks.take_failures(), locks.take_failures()] == [{"page_lock": 1}, {}]
    (said,) = [record.getMessage() for record in caplog.records]
    for words in ("4.0 KiB of the pool are page-locked", REGISTER, "ulimit -l unlimited", "doctor vllm"):
        assert words in said
    assert locks.covers(at, page)
    locks.unlock(at)
    assert not library.registered


def test_a_piece_that_the_driver_does_not_unlock_is_said_to_be_locked_and_not_used(locks, library, memory):
    at = memory.ctypes.data
    locks.lock(at, mmap.PAGESIZE)
    library.fail[UNREGISTER] = 0
    with pytest.raises(CudaError):
        locks.unlock(at)
    assert not locks.covers(at, 1)


def test_memory_is_locked_while_an_engine_records_graphs(locks, library, memory):
    """Which the driver refuses, and spoils the recording, where a thread does not say that it stands apart."""
    at = memory.ctypes.data
    library.recording = True
    with locks.driver.on(0):
        assert library.cuMemHostRegister_v2(at, mmap.PAGESIZE, 1) == 0
        assert library.cuMemHostUnregister(at) == 0
    assert library.cuMemHostRegister_v2(at, mmap.PAGESIZE, 1) in (201, 900), "a control, out of it"
    assert locks.lock(at, mmap.PAGESIZE)
    locks.unlock(at)


def test_a_forked_child_has_no_locks(locks, library, memory):
    page, at = mmap.PAGESIZE, memory.ctypes.data
    assert locks.lock(at, page) and locks.covers(at, page)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(LIMIT_S))
        right = False
        try:
            library.calls.clear()
            locks.unlock(at)
            right = not locks.covers(at, page) and not locks.lock(at + page, page) and not library.calls
        finally:
            os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locks.covers(at, page)


# With a pool


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(locked_memory, "CHUNK_NBYTES", CHUNK)
    monkeypatch.setattr(locked_memory, "_LOOK_PERIOD_S", 0.005)
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else pytest.skip("NOT TESTED: no shared memory")
    folder = Path(tempfile.mkdtemp(prefix="mooncake-test-", dir=parent))
    with EmbeddedStore(folder / "pool", CAPACITY) as store:
        yield store
    shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition):
    give_up_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


@pytest.mark.parametrize("refused", [None, 0, 2])
def test_pages_of_a_pool_are_covered_as_far_as_the_driver_goes(store, locks, library, refused):
    if refused is not None:
        library.fail[REGISTER] = refused
    space, keys = store.space(namespace(), SHARD), chain("a", CAPACITY // PAGE_NBYTES)
    put_chain(space, keys)
    store.lock_memory(locks)
    wait_for(lambda: locks.refused is not None or locks.nbytes == CAPACITY)
    expected = CAPACITY if refused is None else refused * CHUNK
    assert locks.nbytes == expected == sum(library.registered.values())
    views = []
    space.read(keys, lambda _i, view: views.append((view.ctypes.data, len(view))), nbytes=PAGE_NBYTES)
    first = min(address for address, _ in views)
    assert len(views) > 100
    for address, nbytes in views:
        assert locks.covers(address, nbytes) == (address + nbytes - first <= expected)
    store.close()
    assert not library.registered and not locks.covers(*views[0])


def test_whoever_asks_while_pieces_come_and_go_gets_an_answer_that_holds(locks, memory):
    page, at = mmap.PAGESIZE, memory.ctypes.data
    locks.lock(at, page)
    stop = threading.Event()
    answers, draw = set(), random.Random(1)

    def change():
        while not stop.is_set():
            place = at + page * draw.randrange(1, 16)
            locks.lock(place, page)
            locks.unlock(place)

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    for _ in range(2000):
        answers.add((locks.covers(at, page), locks.covers(at - 1, 1), locks.covers(at + 16 * page, 1)))
    stop.set()
    thread.join(LIMIT_S)
    assert answers == {(True, False, False)}


# What the doctor says


def doctor_says(monkeypatch, library):
    monkeypatch.setattr(checks, "system_driver", lambda: Driver(library))
    (check,) = checks.check_page_locks()
    assert not library.registered
    return check


def test_the_doctor_locks_memory_as_an_engine_would(library, monkeypatch):
    check = doctor_says(monkeypatch, library)
    assert (check.name, check.status) == ("page locks", Verdict.OK) and library.calls[REGISTER] == 1


def test_the_doctor_says_how_a_refusal_is_mended(library, monkeypatch):
    library.fail[REGISTER] = 0
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64 << 10, 64 << 10))
    check = doctor_says(monkeypatch, library)
    assert check.status is Verdict.WARNING
    for words in (REGISTER, "64.0 KiB", "ulimit -l unlimited", "docker run --ulimit memlock=-1"):
        assert words in check.detail


def test_the_doctor_is_silent_where_there_is_no_device(monkeypatch):
    def none():
        raise Unavailable("no CUDA device")

    monkeypatch.setattr(checks, "system_driver", none)
    assert list(checks.check_page_locks()) == []


@pytest.mark.parametrize("setting", ["expandable_segments:True", "max_split_size_mb:64,expandable_segments:True"])
def test_the_doctor_warns_of_segments_with_which_vllm_does_not_start(base_config, monkeypatch, setting):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with pytest.raises(ValueError, match="expandable_segments"):
        replace(base_config, kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR, kv_role="kv_both"))
    (check,) = checks.check_allocator()
    assert check.status is Verdict.WARNING and "--enable-cumem-allocator" in check.detail


@pytest.mark.parametrize("setting", [None, "", "expandable_segments:False"])
def test_the_doctor_says_nothing_of_other_settings_of_torchs_allocator(monkeypatch, setting):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if setting is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    assert list(checks.check_allocator()) == []
