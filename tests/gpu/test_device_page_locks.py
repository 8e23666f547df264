"""A pool's memory page-locked by the real driver: a device copies from it, and graphs are recorded meanwhile."""

from __future__ import annotations

import mmap
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from gpu.device import DEVICE, STAND_IN, require, where

from store_client import EmbeddedStore
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, page_bytes, put_chain
from transfer.testing.memory import MIB
from transfer.transports.cuda.driver import system_driver
from vllm_plugin.device.page_locks import PageLocks

require()
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CAPACITY = 64 << 20
LIMIT_S = 120.0


@pytest.fixture
def store():
    folder = Path(tempfile.mkdtemp(prefix="mooncake-test-", dir="/dev/shm"))
    with EmbeddedStore(folder / "pool", CAPACITY) as store:
        put_chain(store.space(namespace(), SHARD), chain("a", CAPACITY // PAGE_NBYTES))
        yield store
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def locks(store):
    locks = PageLocks(system_driver(), DEVICE)
    yield locks
    store.close()
    assert locks.nbytes == 0


def lock_all(store, locks):
    store.lock_memory(locks)
    give_up_s = time.monotonic() + LIMIT_S
    while locks.nbytes < CAPACITY:
        assert locks.refused is None and time.monotonic() < give_up_s
        time.sleep(0.01)


def test_torch_takes_the_pools_memory_for_page_locked_and_copies_it_right(store, locks):
    memory = torch.from_numpy(store.memory)
    assert not memory.is_pinned()
    lock_all(store, locks)
    assert memory.is_pinned() or STAND_IN
    space, keys, on_device = store.space(namespace(), SHARD), chain("a", CAPACITY // PAGE_NBYTES), {}

    def consume(i, view):
        assert locks.covers(view.ctypes.data, len(view))
        start = view.ctypes.data - store.memory.ctypes.data
        on_device[i] = memory[start : start + len(view)].to(where(), non_blocking=True)

    found = space.read(keys, consume, nbytes=PAGE_NBYTES, settle=lambda: torch.cuda.synchronize(DEVICE))
    assert sum(found) > 100
    for i, page in on_device.items():
        assert np.array_equal(page.cpu().numpy(), page_bytes(keys[i]))


def test_device_memory_that_page_locks_take_is_shown(capsys):
    nbytes = MIB if STAND_IN else 4 << 30
    memory, driver = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8), system_driver()
    before, _ = torch.cuda.mem_get_info(DEVICE)
    driver.register(DEVICE, memory.ctypes.data, nbytes)
    taken = before - torch.cuda.mem_get_info(DEVICE)[0]
    driver.unregister(DEVICE, memory.ctypes.data)
    with capsys.disabled():
        print(f"\n{taken / MIB:.1f} MiB of device memory for {nbytes / MIB:.0f} MiB of page locks; 1/512 expected")


@pytest.mark.skipif(STAND_IN, reason="a stand-in for the driver records no graphs")
def test_memory_is_locked_while_a_graph_is_recorded_and_the_graph_is_none_the_worse(store, locks):
    count = torch.zeros(1, device=f"cuda:{DEVICE}")
    graph, failed = torch.cuda.CUDAGraph(), []

    def lock():
        try:
            lock_all(store, locks)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=lock, daemon=True)
    with torch.cuda.graph(graph):
        thread.start()
        count += 1
        thread.join(LIMIT_S)
        count += 1
    assert not failed and not thread.is_alive()
    before = count.item()
    graph.replay()
    torch.cuda.synchronize(DEVICE)
    assert count.item() == before + 2
