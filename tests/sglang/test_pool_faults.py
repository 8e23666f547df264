"""Faults of the store under the backend: nothing raises, nothing hangs, and no wrong byte is reported as right."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from host_pools import PAGES, axes, mamba, mha, model, slots
from instances import DYNAMIC, keys, open_storage, storage_config
from lock_holder import stopped_holder
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from simulated.waiting import wait_for

from mooncake_connector.errors import ConfigError, ModelIdentityError
from sglang_backend import hicache
from sglang_backend.weights import MemoryWeights
from store_client.base import Lookup
from store_client.embedded import EmbeddedStore
from store_client.testing import namespace

NAMES = keys(PAGES)
WHOLE = list(range(PAGES))


@pytest.fixture
def storage(attach) -> Any:
    """A backend with all pages of its host pool in the store; the host pool is blank."""
    host_pool = mha("page_first")
    axes(host_pool)[:] = model(1)
    storage = attach(host_pool, load_deadline_s=40.0, save_deadline_s=40.0)  # a busy machine leaves a thread waiting
    assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [True] * PAGES
    axes(host_pool)[:] = 0
    return storage


def check(storage: Any, found: list[bool]) -> None:
    """What is reported as right is right; the host pool is blank afterwards."""
    assert len(found) == PAGES
    memory = axes(storage.mem_pool_host)
    for page, right in enumerate(found):
        if right:
            assert np.array_equal(memory[page], model(1)[page])
    memory[:] = 0


def load(storage: Any) -> list[bool]:
    found = storage.batch_get_v1(NAMES, slots(WHOLE))
    check(storage, found)
    return found


def set_deadline(storage: Any, **deadline_s: float) -> None:
    storage._kv._config = msgspec.structs.replace(storage._kv._config, **deadline_s)


def end_pauses(storage: Any) -> None:
    """As if the pause after a fault were over."""
    for mover in (storage._movers.loads, storage._movers.saves):
        mover._paused_until_s = 0.0


class Asked:
    """Everything that SGLang may ask, with the backend in whatever state; counts what is answered."""

    def __init__(self, storage: Any) -> None:
        pool = storage.mem_pool_host
        data = [pool.get_data_page(page * pool.page_size) for page in WHOLE]
        flat = [pool.get_dummy_flat_data_page() for _ in WHOLE]
        before = HiCacheStorageExtraInfo(prefix_keys=keys(2, "before"))
        fresh = keys(PAGES, "fresh")
        transfer = [PoolTransfer(PoolName.KV, host_indices=slots(WHOLE), keys=fresh)]
        self.exists = storage.batch_exists(NAMES)
        self.one = storage.exists(NAMES[0])
        self.exists_v2 = storage.batch_exists_v2(NAMES, transfer, before)
        self.loaded = storage.batch_get_v1(NAMES, slots(WHOLE), before)
        self.stored = storage.batch_set_v1(fresh, slots(WHOLE), before)
        self.loaded_v2 = storage.batch_get_v2(transfer, before)[PoolName.KV]
        self.stored_v2 = storage.batch_set_v2(transfer, before)[PoolName.KV]
        self.flat = storage.batch_get(NAMES, flat)
        self.flat_one = storage.get(NAMES[0], flat[0])
        self.set_flat = storage.batch_set(keys(PAGES, "flat"), data)
        self.set_one = storage.set(keys(1, "one")[0], data[0])
        storage.clear()
        storage.get_stats()
        lists = (self.loaded, self.stored, self.loaded_v2, self.stored_v2, self.flat)
        assert [len(answer) for answer in lists] == [PAGES] * 5
        assert all(type(answer) is bool for answer in (*self.loaded, *self.stored, *self.loaded_v2, *self.stored_v2))

    @property
    def hits(self) -> int:
        right = [*self.loaded, *self.stored, *self.loaded_v2, *self.stored_v2, self.one, self.set_flat, self.set_one]
        flat = [page is not None for page in (*self.flat, self.flat_one)]
        return self.exists + self.exists_v2.kv_hit_pages + sum(right) + sum(flat)


def test_a_page_that_vanishes_after_the_lookup(storage, pool: Path) -> None:
    assert storage.batch_exists(NAMES) == PAGES
    storage._kv.view.own.remove([bytes.fromhex(NAMES[5])])
    found = load(storage)
    assert found[:5] == [True] * 5 and found[5] is False
    assert storage.batch_exists(NAMES) == 5


def test_corrupt_pages_are_not_reported_as_right(storage, pool: Path) -> None:
    (arena,) = pool.rglob("arena")
    content = bytearray(arena.read_bytes())
    at = content.find(model(1)[7].tobytes())
    assert at >= 0
    with arena.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([content[at + 100] ^ 1]))
    found = load(storage)
    assert found[:7] == [True] * 7 and found[7] is False
    wait_for(lambda: not storage.exists(NAMES[7]))
    assert storage.batch_set_v1(NAMES[7:8], slots([3])) == [True], "it can be stored again"


def test_the_lock_is_held_by_a_stopped_process(storage, pool: Path, caplog) -> None:
    """Loads take no lock, so they go on. A save waits once, and the next ones are dropped at once."""
    fresh = keys(PAGES, "fresh")
    with stopped_holder(pool):
        assert storage.batch_set_v1(fresh, slots(WHOLE)) == [False] * PAGES
        assert storage._movers.saves.paused and not storage._movers.loads.paused
        assert load(storage) == [True] * PAGES
        assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [False] * PAGES
        assert caplog.text.count("a save ended after") == 1
    end_pauses(storage)
    assert storage.batch_set_v1(fresh, slots(WHOLE)) == [True] * PAGES


def test_a_full_pool_keeps_the_newest_pages(attach, pool: Path) -> None:
    storage = attach(mha("page_first"), capacity=1 << 20)
    for number in range(60):
        names = keys(PAGES, f"prompt {number}")
        axes(storage.mem_pool_host)[:] = model(number)
        storage.batch_set_v1(names, slots(WHOLE))
    with EmbeddedStore(pool) as store:
        assert store.stats().evicted_pages > 0
    assert storage.batch_get_v1(names, slots(WHOLE)) == [True] * PAGES
    assert np.array_equal(axes(storage.mem_pool_host), model(number))
    assert storage.batch_exists(keys(PAGES, "prompt 0")) < PAGES


def test_what_fits_of_a_write_is_kept(attach) -> None:
    """A chain that is larger than the pool: a page never pushes out the one before it."""
    storage = attach(mha("page_first", dim=512), capacity=1 << 20)
    assert storage._kv.pages.unit_nbytes * 16 * PAGES > 1 << 20
    stored = storage.batch_set_v1(NAMES, slots(WHOLE))
    count = storage.batch_exists(NAMES)
    assert 0 < count < PAGES
    assert stored == [page < count for page in WHOLE]


def test_the_folder_is_deleted(storage, pool: Path) -> None:
    shutil.rmtree(pool)
    wait_for(lambda: load(storage) and not storage.batch_exists(NAMES))
    axes(storage.mem_pool_host)[:] = model(1)
    wait_for(lambda: all(storage.batch_set_v1(NAMES, slots(WHOLE))))
    assert load(storage) == [True] * PAGES, "the pool was not made again"


def test_there_is_no_pool(attach, tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    storage = attach(mha("page_first"), pool=tmp_path / "file" / "pool")
    assert Asked(storage).hits == 0
    assert str(tmp_path / "file") in caplog.text


@pytest.mark.parametrize("call", ["read", "write", "contains", "lookup"])
def test_a_store_that_raises_is_left_alone_for_a_while(faults, storage, call: str) -> None:
    faults.raise_in = {call}
    lost = Asked(storage)
    assert not any(lost.loaded if call in ("read", "lookup") else lost.stored)
    faults.calls.clear()
    Asked(storage)
    assert faults.calls[call] == 0, "asked during the pause"
    faults.raise_in.clear()
    end_pauses(storage)
    axes(storage.mem_pool_host)[:] = model(1)
    assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [True] * PAGES and load(storage) == [True] * PAGES


def test_a_load_that_hangs_is_given_up_and_touches_the_memory_no_more(faults, storage) -> None:
    faults.hold_reads()
    set_deadline(storage, load_deadline_s=0.05)
    assert load(storage) == [False] * PAGES
    set_deadline(storage, load_deadline_s=40.0)
    end_pauses(storage)
    faults.calls.clear()
    assert storage.batch_exists(NAMES) == 0 and load(storage) == [False] * PAGES
    assert faults.calls["read"] == 0, "asked again while the first call hangs"
    faults.release()
    assert storage._movers.loads.stop(30) and not axes(storage.mem_pool_host).any()
    assert load(storage) == [True] * PAGES


def test_a_save_that_hangs_is_given_up_and_stores_nothing(faults, storage) -> None:
    faults.hold_writes()
    fresh = keys(PAGES, "fresh")
    set_deadline(storage, save_deadline_s=0.05)
    assert storage.batch_set_v1(fresh, slots(WHOLE)) == [False] * PAGES
    set_deadline(storage, save_deadline_s=40.0)
    assert load(storage) == [True] * PAGES, "loads go on"
    faults.release()
    assert storage._movers.saves.stop(30)
    end_pauses(storage)
    assert storage.batch_exists(fresh) == 0, "pages were stored from memory that is somebody else's by now"
    assert storage.batch_set_v1(fresh, slots(WHOLE)) == [True] * PAGES


def test_pages_that_arrived_before_a_hang_are_kept(faults, storage, monkeypatch) -> None:
    """Small pages are moved by the hundred; here 16 at a time. The host pool has 12, so ask for them twice."""
    monkeypatch.setattr("store_client.jobs._MOVE_NBYTES", 0)
    calls = []

    def hang_at_the_second(names: list[bytes]) -> list[bool]:
        calls.append(len(names))
        if len(calls) == 2:
            faults.hold_reads()
            faults.wait_to_read(storage._kv.view.shard)
        return [False] * len(names)

    faults.lose_reads = hang_at_the_second
    set_deadline(storage, load_deadline_s=5.0)  # without a page
    found = storage.batch_get_v1(NAMES * 2, slots(WHOLE * 2))
    assert found == [True] * 16 + [False] * 8
    faults.release()


def test_pages_are_taken_as_they_land_until_none_does(faults, storage) -> None:
    """SGLang's thread waits for them; what has not landed when nothing did for the deadline is not waited for."""
    names = [bytes.fromhex(name) for name in NAMES]
    landed = names[:2]

    def answer(asked: list[bytes], found: Lookup) -> Lookup:
        if len(landed) < 9:
            landed.append(names[len(landed)])
        elif asked[0] == names[9]:
            storage._movers.loads.pending[0].deadline_s = 0.0  # as if nothing had landed for so long
        count = next((index for index, key in enumerate(asked) if key not in landed), len(asked))
        return Lookup(count, pending=count < len(asked))

    faults.answer = answer
    found = storage.batch_get_v1(NAMES, slots(WHOLE))
    memory = axes(storage.mem_pool_host).copy()
    landed += names
    assert found == [True] * 9 + [False] * 3
    assert storage._movers.loads.stop(30) and np.array_equal(axes(storage.mem_pool_host), memory)
    check(storage, found)


def test_refused_writes_are_reported_and_tried_again(faults, storage) -> None:
    faults.refuse_writes = True
    assert storage.batch_set_v1(keys(3, "fresh"), slots([0, 1, 2])) == [False] * 3
    faults.refuse_writes = False
    assert storage.batch_set_v1(keys(3, "fresh"), slots([0, 1, 2])) == [True] * 3


@pytest.fixture
def weights(monkeypatch) -> MemoryWeights:
    """As in a process whose weights did not change yet."""
    monkeypatch.setattr(hicache, "in_memory", MemoryWeights())
    return hicache.in_memory


def test_changed_weights_leave_the_pages_of_the_files(attach, monkeypatch, weights) -> None:
    host_pool, other = mha("page_first"), mha("page_head")
    storage = attach(host_pool)
    assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [True] * PAGES
    weights.changed()
    assert storage.batch_exists(NAMES) == 0
    assert weights.of(namespace()).is_private
    axes(host_pool)[:] = model(2)
    assert storage.batch_set_v1(NAMES[:3], slots([0, 1, 2])) == [True] * 3 and storage.batch_exists(NAMES) == 3
    storage.close()
    again = attach(mha("page_first"))
    assert again.batch_exists(NAMES) == 3, "also for a backend that is attached afterwards"
    weights.changed()
    assert again.batch_exists(NAMES) == 0, "changed again"
    monkeypatch.setattr(hicache, "in_memory", MemoryWeights())  # as in another process
    neighbour = attach(other)
    assert neighbour.batch_get_v1(NAMES, slots(WHOLE)) == [True] * PAGES
    assert not np.array_equal(axes(other)[:3], model(2)[:3]), "the new weights' pages are for this process alone"


def test_what_sglang_kept_of_old_weights_is_not_read_once_its_caches_are_empty(attach, weights) -> None:
    """An update without a flush, or whose flush was refused since requests were running: these end, and are stored."""
    storage = attach(mha("page_first"))
    storage.batch_set_v1(NAMES, slots(WHOLE))
    weights.caches_emptied()
    assert storage.batch_exists(NAMES) == PAGES, "the weights never changed"
    weights.changed()
    assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [True] * PAGES
    weights.caches_emptied()
    assert storage.batch_exists(NAMES) == 0
    assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [True] * PAGES
    weights.caches_emptied()
    assert storage.batch_exists(NAMES) == PAGES, "these are the new weights'"


def test_clear_forgets_our_pages_alone(attach, pool: Path) -> None:
    states = mamba()
    ours, theirs = attach(mha("page_first")), attach(mha("page_first"), model_id="other")
    ours.register_mem_host_pool_v2(states, PoolName.MAMBA)
    transfer = [PoolTransfer(PoolName.MAMBA, host_indices=slots([0, 1], 1), keys=NAMES[:2])]
    ours.batch_set_v2(transfer)
    for storage in (ours, theirs):
        storage.batch_set_v1(NAMES, slots(WHOLE))
    ours.clear()
    assert (ours.batch_exists(NAMES), theirs.batch_exists(NAMES)) == (0, PAGES)
    assert ours.batch_get_v2(transfer) == {PoolName.MAMBA: [False, False]}
    with EmbeddedStore(pool) as store:
        assert store.stats().pages == PAGES


def test_a_closed_backend_misses_and_may_be_attached_again(attach) -> None:
    storage = attach(mha("page_first"))
    storage.batch_set_v1(NAMES, slots(WHOLE))
    storage.close()
    storage.close()
    assert Asked(storage).hits == 0
    again = attach(mha("page_first"))
    assert again.batch_exists(NAMES) == PAGES
    storage.register_mem_pool_host(storage.mem_pool_host)
    assert storage.batch_exists(NAMES) == PAGES


def test_a_backend_without_a_host_pool_misses(pool: Path) -> None:
    config = storage_config(pool=str(pool), **DYNAMIC)
    storage = StorageBackendFactory.create_backend("dynamic", config, None)
    assert storage.batch_exists(NAMES) == 0 and not storage.exists(NAMES[0])
    assert storage.batch_exists_v2(NAMES).kv_hit_pages == 0
    storage.clear()
    storage.close()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"capcity": "1GiB"}, ConfigError, r"unknown configuration key 'capcity'.*did you mean capacity"),
        ({"capacity": "much"}, ConfigError, "capacity in the engine's JSON is 'much'"),
        ({"page_tokens": 64}, ConfigError, r"page_tokens is 64, but SGLang's pages have 16.*--page-size 64"),
        ({"model_id": None}, ModelIdentityError, "set `model_id`"),
    ],
)
def test_a_wrong_setting_fails_the_attachment(pool: Path, options: dict[str, Any], error: type, said: str) -> None:
    """SGLang shows the text to whoever attaches."""
    with pytest.raises(error, match=said):
        open_storage(mha("page_first"), pool=pool, **options)


def test_keys_of_sglangs_own_are_none_of_ours(attach) -> None:
    attach(mha("page_first"), prefetch_threshold=64, hicache_storage_pass_prefix_keys=True, tp_lcm_size=4)


def test_calls_that_lack_something_are_no_fault_of_the_store(storage) -> None:
    assert storage.get(NAMES[0]) is None and storage.batch_get(NAMES, None) == [None] * PAGES
    assert storage.batch_get(NAMES, [storage.mem_pool_host.get_dummy_flat_data_page()]) == [None] * PAGES
    assert storage.batch_set(NAMES) is False
    assert storage.batch_get_v1(NAMES, slots([0])) == [False] * PAGES
    assert storage.batch_set_v1(keys(2, "fresh"), slots([0])) == [False] * 2
    assert storage.batch_get_v1([], slots([0])[:0]) == [] and storage.batch_exists([]) == 0
    assert load(storage) == [True] * PAGES


def test_figures_are_those_since_the_last_look(storage) -> None:
    storage.get_stats()
    load(storage)
    load(storage)
    storage.batch_set_v1([*NAMES, *keys(2, "fresh")], slots([*WHOLE, 0, 1]))
    stats = storage.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([PAGES, PAGES], [2]), "pages that were there are not written"
    assert len(stats.prefetch_bandwidth) == 2 and min(stats.prefetch_bandwidth) > 0
    assert storage.get_stats().prefetch_pgs == []


def test_three_threads_at_once(attach) -> None:
    """SGLang looks up, loads and saves in a thread each; pages come and go meanwhile."""
    storage = attach(mha("page_head"), capacity=1 << 20)
    writer = attach(mha("layer_first"), capacity=1 << 20)
    axes(writer.mem_pool_host)[:] = model(1)
    stop, problems, loaded = threading.Event(), [], []

    def forever(step: Any) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    step()
            except Exception as error:
                problems.append(error)
                stop.set()

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def look_up() -> None:
        assert 0 <= storage.batch_exists(NAMES) <= PAGES

    def save() -> None:
        writer.batch_set_v1(NAMES, slots(WHOLE))
        writer.batch_set_v1(keys(PAGES, f"{len(loaded)}"), slots(WHOLE))

    def fetch() -> None:
        loaded.append(sum(load(storage)))
        if len(loaded) >= 100:
            stop.set()

    threads = [forever(step) for step in (look_up, save, fetch, storage.get_stats)]
    threads.append(forever(lambda: stop.wait(0.05) or writer.clear()))
    for thread in threads:
        thread.join(60)
    assert not problems and len(loaded) >= 100 and max(loaded) == PAGES


@pytest.mark.parametrize("wrong", ["not hex", "", "ab", NAMES[0] + "00", None, 5])
def test_keys_that_are_no_page_hashes_are_misses(storage: Any, wrong: Any) -> None:
    names = [*NAMES[:-1], wrong]
    pool = storage.mem_pool_host
    flat = [pool.get_dummy_flat_data_page() for _ in WHOLE]
    transfer = [PoolTransfer(PoolName.KV, host_indices=slots(WHOLE), keys=names)]
    before = HiCacheStorageExtraInfo(prefix_keys=[wrong])
    missed = [False] * PAGES
    assert storage.batch_get_v1(names, slots(WHOLE)) == missed
    assert storage.batch_set_v1(names, slots(WHOLE)) == missed
    assert storage.batch_set_v1(NAMES, slots(WHOLE), before) == missed
    assert storage.batch_get_v2(transfer) == {PoolName.KV: missed}
    assert storage.batch_set_v2(transfer) == {PoolName.KV: missed}
    assert storage.batch_get(names, flat) == [None] * PAGES
    assert storage.get(wrong, flat[0]) is None
    assert not storage.batch_set(names, flat)
    assert not storage.exists(wrong)
    assert storage.batch_exists(names) == 0
    assert storage.batch_exists_v2(names, transfer).kv_hit_pages == 0
    assert load(storage) == [True] * PAGES, "nothing is wrong with the store"
