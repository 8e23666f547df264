"""SGLang's own controller with its threads over our backend: ranks of an MLA model, pools beside the KV cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from causes import forget_causes
from controllers import Rank
from faults import Faults, Late, lying, never
from host_pools import MLA_LAYOUTS, axes, bytes_of, fill_with, mamba, mha, mla, slots
from instances import DYNAMIC, server
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PPPrefetchTicket
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_parallel
from simulated.waiting import wait_for

from sglang_backend import BACKEND, plugin, stored_pool
from store_client.base import Lookup, StoreStats
from store_client.embedded import EmbeddedStore, registry
from store_client.sharded import ShardView

TOKENS = [token * 7 % 257 for token in range(5 * 64 + 10)]
PAGES = 5
FULL = PAGES * 64


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    load_plugins()


@pytest.fixture
def start(pool: Path) -> Iterator[Callable[..., Rank]]:
    """Start a rank of the MLA checkpoint (or of Qwen3), whose host pool is filled by `seed`."""
    forget_causes()
    ranks: list[Rank] = []

    def start_one(
        layout: str = "page_first", *, tp: tuple[int, int] = (0, 1), hosts: int = 1, of_host: Path = pool,
        seed: int = 0, is_mla: bool = True, **options: Any,
    ) -> Rank:  # fmt: skip
        more = {"nnodes": hosts, "dist_init_addr": "127.0.0.1:1"} if hosts > 1 else {}
        with server("deepseek-mla" if is_mla else "qwen3", tp_size=tp[1], **more):
            if is_mla:
                device = MLATokenToKVPool(64, 64, torch.bfloat16, 512, 64, 4, "cpu", False)
                host_pool = mla(layout, latent=512, rope=64, page_tokens=64)
            else:
                device = MHATokenToKVPool(64, 64, torch.bfloat16, 4 // tp[1], 64, 8, "cpu", False)
                host_pool = mha(layout, layers=(0, 8), heads=4 // tp[1], dim=64, page_tokens=64)
            memory = axes(host_pool)
            memory[:] = np.random.default_rng(seed).integers(0, 1 << 16, memory.shape, dtype=np.uint16)
            ranks.append(Rank(device, host_pool, of_host, **{"name": BACKEND, "tp_rank": tp[0], **options}))
        return ranks[-1]

    yield start_one
    for rank in ranks:
        rank.detach()


def stats(pool: Path) -> StoreStats:
    with EmbeddedStore(pool) as store:
        return store.stats()


def content(rank: Rank, indices: torch.Tensor) -> Any:
    return axes(rank.host_pool)[(indices[::64] // 64).tolist()]


@pytest.mark.parametrize("layout", MLA_LAYOUTS)
@pytest.mark.parametrize("way", [{"name": BACKEND}, {"name": "dynamic", **DYNAMIC}], ids=["own name", "dynamic"])
def test_an_mla_model_finds_its_pages_again(start, layout: str, way: dict[str, Any]) -> None:
    writer = start(layout, seed=1, **way)
    stored_at = writer.host_pool.alloc(FULL)
    assert writer.save(TOKENS[:FULL], stored_at)[0] == FULL
    reader = start(seed=2)
    loaded, loaded_at, _ = reader.load(TOKENS)
    assert loaded == FULL
    assert np.array_equal(content(reader, loaded_at), content(writer, stored_at))
    assert reader.load(TOKENS[1:])[0] == 0, "other tokens"


def test_the_ranks_of_an_mla_model_share_one_copy_that_one_of_them_wrote(start, pool: Path) -> None:
    """Each rank has the whole latent cache. One stores it; a page moves once to each rank, from the host's one copy."""
    size = 4
    writers = [start(tp=(rank, size), seed=1) for rank in range(size)]
    for rank, writer in enumerate(writers):
        assert writer.save(TOKENS[:FULL], writer.host_pool.alloc(FULL))[0] == (0 if rank else FULL)
    after_saves = stats(pool)
    assert (after_saves.stored_pages, after_saves.present_pages, after_saves.pages) == (PAGES, 0, PAGES)
    for rank in range(size):
        reader = start(tp=(rank, size), seed=2)
        loaded, indices, _ = reader.load(TOKENS)
        assert loaded == FULL and np.array_equal(content(reader, indices), axes(writers[0].host_pool)[:PAGES])
        assert stats(pool).read_pages - after_saves.read_pages == (rank + 1) * PAGES
    assert stats(pool).stored_pages == PAGES


def test_the_ranks_of_an_mla_model_on_two_hosts_find_what_one_of_each_host_wrote(start, pool: Path) -> None:
    pools = (pool, pool.with_name("of-another-host"))
    writers = [start(tp=(rank, 4), hosts=2, of_host=pools[rank // 2], seed=1) for rank in range(4)]
    saved = [writer.save(TOKENS[:FULL], writer.host_pool.alloc(FULL))[0] for writer in writers]
    assert saved == [FULL, 0, FULL, 0]
    assert [stats(each).stored_pages for each in pools] == [PAGES, PAGES]
    for rank in range(4):
        reader = start(tp=(rank, 4), hosts=2, of_host=pools[rank // 2], seed=2)
        loaded, indices, _ = reader.load(TOKENS)
        assert loaded == FULL and np.array_equal(content(reader, indices), axes(writers[0].host_pool)[:PAGES])


def test_an_instance_with_one_rank_reads_what_two_ranks_wrote(start) -> None:
    writers = [start("page_head", tp=(rank, 2), seed=rank, is_mla=False) for rank in range(2)]
    for writer in writers:
        assert writer.save(TOKENS[:FULL], writer.host_pool.alloc(FULL))[0] == FULL
    reader = start("layer_first", is_mla=False, seed=9)
    loaded, indices, _ = reader.load(TOKENS)
    assert loaded == FULL
    both = np.concatenate([axes(writer.host_pool)[:PAGES] for writer in writers], axis=4)
    assert np.array_equal(content(reader, indices), both)


class TestSidecars:
    def state(self, name: PoolName, indices: torch.Tensor | None, count: int = 1) -> list[PoolTransfer]:
        """A transfer of the last `count` pages; the controller puts in the keys of what was hit."""
        keys = ["0" * 64] * count
        return [PoolTransfer(name, host_indices=indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)]

    def saved(self, rank: Rank, name: PoolName, pages: int, indices: torch.Tensor) -> tuple[int, dict[str, int]]:
        tokens = TOKENS[: pages * 64]
        last = get_storage_hash_str(tokens, None, page_size=64)[-1]
        return rank.save(tokens, slots(list(range(pages)), 64), [PoolTransfer(name, host_indices=indices, keys=[last])])

    def test_the_last_page_with_a_state_is_the_hit(self, start) -> None:
        states, restored = mamba(), mamba()
        expected = fill_with(states, 3, seed=3)
        writer = start(seed=1, sidecars={PoolName.MAMBA: states})
        assert self.saved(writer, PoolName.MAMBA, 3, torch.tensor([3])) == (3 * 64, {PoolName.MAMBA: 1})
        writer.save(TOKENS[:FULL], slots(list(range(PAGES)), 64))  # two more pages, without a state
        reader = start(seed=2, sidecars={PoolName.MAMBA: restored})
        loaded, indices, hits = reader.load(TOKENS, self.state(PoolName.MAMBA, restored.alloc(1)))
        assert (loaded, hits[PoolName.MAMBA]) == (3 * 64, 1)
        assert np.array_equal(content(reader, indices), axes(writer.host_pool)[:3])
        assert bytes_of(restored, 0) == expected

    def test_a_state_that_is_lost_after_the_lookup_is_no_hit(self, start, monkeypatch) -> None:
        states, restored = mamba(), mamba()
        writer = start(seed=1, sidecars={PoolName.MAMBA: states})
        self.saved(writer, PoolName.MAMBA, 3, torch.tensor([3]))
        reader = start(seed=2, sidecars={PoolName.MAMBA: restored})
        storage = reader.controller.storage_backend
        look_up = storage.batch_exists_v2

        def look_up_and_lose(*args: Any) -> Any:
            found = look_up(*args)
            storage._others[PoolName.MAMBA].view.clear()
            return found

        monkeypatch.setattr(storage, "batch_exists_v2", look_up_and_lose)
        loaded, _, hits = reader.load(TOKENS, self.state(PoolName.MAMBA, restored.alloc(1)))
        assert (loaded, hits[PoolName.MAMBA]) == (3 * 64, 0), "SGLang drops the whole prefetch then"

    @pytest.mark.parametrize(("draft", "stored"), [(mha, 2), (mla, 1)], ids=["mha draft", "mla draft"])
    def test_every_rank_finds_the_draft_of_an_mla_model(self, start, pool: Path, draft: Any, stored: int) -> None:
        """An MHA draft's heads are split over the ranks, so each rank stores its own; an MLA draft's are not."""
        written = []
        for rank in range(2):
            host_pool = draft("page_first", page_tokens=64)
            written.append(fill_with(host_pool, 0, seed=rank if draft is mha else 0))
            writer = start(tp=(rank, 2), seed=1, sidecars={PoolName.DRAFT: host_pool})
            writer.save(TOKENS[:64], slots([0], 64), [PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)])
        assert stats(pool).stored_pages == 1 + stored
        for rank in range(2):
            host_pool = draft("page_first", page_tokens=64)
            reader = start(tp=(rank, 2), seed=2, sidecars={PoolName.DRAFT: host_pool})
            loaded, indices, _ = reader.load(TOKENS, [PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)])
            assert loaded == 64 and bytes_of(host_pool, int(indices[0]) // 64) == written[rank]


def test_detached_and_attached_again(start, pool: Path) -> None:
    rank = start(seed=1)
    rank.save(TOKENS[:FULL], slots(list(range(PAGES)), 64))
    rank.detach()
    controller = rank.controller
    with server("deepseek-mla"), get_parallel().override(tp_rank=0, pp_rank=0):
        controller.attach_storage_backend(BACKEND, 64, "served", {"pool": str(pool)}, controller.mem_pool_host.entries)
    assert rank.load(TOKENS)[0] == FULL
    assert controller.clear_storage_backend() is True
    assert rank.load(TOKENS)[0] == 0


def test_a_pool_that_cannot_be_closed_holds_up_no_scheduler(start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = start(seed=1)
    monkeypatch.setattr("sglang_backend.hicache._CLOSE_S", 0.05)
    with registry._lock:  # as while another pool of this process is being opened
        rank.detach()
        assert rank.controller.storage_backend is None


def test_a_clear_that_takes_long_goes_on_without_sglangs_scheduler(start, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, go_on, clear = start(seed=1), threading.Event(), ShardView.clear
    rank.save(TOKENS[:FULL], slots(list(range(PAGES)), 64))
    monkeypatch.setattr("sglang_backend.hicache._CLEAR_S", 0.05)
    monkeypatch.setattr(ShardView, "clear", lambda view: go_on.wait(60) and clear(view))
    assert rank.controller.clear_storage_backend() is True
    assert rank.load(TOKENS)[0] == FULL, "it still waits"
    go_on.set()
    wait_for(lambda: rank.load(TOKENS)[0] == 0)


# Lookups that the store cannot answer at once, or answers wrongly


@pytest.fixture
def written(start) -> Any:
    """What a rank stored, page by page."""
    writer = start(seed=1)
    writer.save(TOKENS[:FULL], writer.host_pool.alloc(FULL))
    return axes(writer.host_pool)[:PAGES]


def test_the_prefetch_thread_waits_for_an_answer_that_comes_late(start, faults: Faults, written: Any) -> None:
    reader = start(lookup_wait_s=60.0)
    faults.answer = late = Late(asked=4, before=2)
    loaded, indices, _ = reader.load(TOKENS)
    assert loaded == FULL and np.array_equal(content(reader, indices), written)
    assert max(late.times.values()) == 4


def test_when_the_wait_is_over_what_is_there_is_taken_and_the_next_does_not_wait(
    start, faults: Faults, written: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reader = start(lookup_wait_s=0.05)
    faults.answer = lambda keys, found: Lookup(min(2, found.pages), pending=True)
    loaded, indices, _ = reader.load(TOKENS)
    assert loaded == 2 * 64 and np.array_equal(content(reader, indices), written[:2])
    faults.calls.clear()
    assert reader.load(TOKENS)[0] == 2 * 64
    assert faults.calls["lookup"] == 2, "by SGLang's lookup, and by its load"
    assert caplog.text.count("the pool did not say within 0.05 s") == 1


def test_of_what_a_store_says_is_there_only_what_arrives_is_used(start, faults: Faults) -> None:
    reader = start()
    faults.answer = lying
    before = axes(reader.host_pool).copy()
    assert reader.load(TOKENS)[0] == 0
    assert np.array_equal(axes(reader.host_pool), before)


@pytest.mark.parametrize("answer", [never, lambda keys, found: 1 / 0], ids=["never", "raises"])
def test_the_scheduler_itself_never_waits(start, faults: Faults, written: Any, answer: Any) -> None:
    """With prefill and decode apart SGLang's scheduler asks in its own thread."""
    reader = start(lookup_wait_s=60.0)
    faults.answer = answer
    names = get_storage_hash_str(TOKENS[:FULL], None, page_size=64)
    faults.calls.clear()
    assert reader.controller.storage_backend.batch_exists(names) == 0
    assert faults.calls["lookup"] == 1


def test_after_a_lookup_that_hung_the_store_is_left_alone(
    start, faults: Faults, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_pool, "_LOOKUP_HANGS_S", 0.01)
    reader = start(lookup_wait_s=0.0)

    def hang(keys: Any, found: Lookup) -> Lookup:
        time.sleep(0.02)
        return Lookup(0)

    faults.answer = hang
    faults.calls.clear()
    assert [reader.load(TOKENS)[0] for _ in range(3)] == [0, 0, 0]
    assert faults.calls["lookup"] == 1


def test_a_detached_backend_does_not_wait_on(start, faults: Faults, written: Any) -> None:
    """A request that is aborted meanwhile costs the thread no more than the wait."""
    reader = start(lookup_wait_s=0.05)
    faults.answer = never
    reader.controller.prefetch(CacheRequestHandle("request", 0), TOKENS, None, [], None).mark_terminate()
    assert reader.controller.prefetch_hit_queue.get(timeout=60).storage_hit_count == 0


def test_a_save_that_does_not_end_holds_up_no_flush(start, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_FINISHES_S", 0.1)
    rank = start(save_deadline_s=600.0)
    names, at = get_storage_hash_str(TOKENS[:FULL], None, page_size=64), rank.host_pool.alloc(FULL)
    faults.hold_writes()
    rank.controller.write_storage(at, TOKENS[:FULL], names, [], None)
    assert faults.writing.wait(60)
    rank.controller.reset()  # raises where its threads do not come back
    faults.release()
    wait_for(lambda: rank.save(TOKENS[:FULL], at)[0] == FULL)


def test_a_save_under_way_goes_on_behind_a_flush(start, faults: Faults) -> None:
    rank = start()
    names = get_storage_hash_str(TOKENS[:FULL], None, page_size=64)
    faults.hold_writes()
    rank.controller.write_storage(rank.host_pool.alloc(FULL), TOKENS[:FULL], names, [], None)
    assert faults.writing.wait(60)
    rank.controller.storage_stop_event.set()
    release = threading.Timer(0.2, faults.release)
    release.start()
    rank.controller.reset()
    release.join()
    assert rank.load(TOKENS)[0] == FULL


@pytest.mark.parametrize("end", ["flush", "abort"])
def test_a_lookup_that_nobody_waits_for_any_more_holds_up_no_flush(
    start, faults: Faults, written: Any, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    reader = start(lookup_wait_s=60.0)
    controller, asked = reader.controller, threading.Event()
    faults.answer = lambda keys, found: asked.set() or Lookup(0, pending=True)
    operation = controller.prefetch(CacheRequestHandle("request", 0), TOKENS, None, [], None)
    assert asked.wait(60)
    if end == "flush":
        controller.reset()  # raises where its threads do not come back
    else:
        controller.terminate_prefetch(operation)
        assert controller.prefetch_hit_queue.get(timeout=30).storage_hit_count == 0
    assert "the pool did not say" not in caplog.text
    faults.answer = late = Late(asked=4, before=2)
    assert reader.load(TOKENS)[0] == FULL and max(late.times.values()) == 4, "the next one waits again"


@pytest.mark.parametrize("end", ["reset", "detach_storage_backend"])
def test_a_lookup_for_all_stages_of_a_pipeline_holds_up_no_flush(
    start, faults: Faults, written: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """With `--hicache-host-memory-mode buffer_only` a thread of its own asks, for which SGLang waits first."""
    reader = start(lookup_wait_s=60.0)
    controller, asked = reader.controller, threading.Event()
    faults.answer = lambda keys, found: asked.set() or Lookup(0, pending=True)
    monkeypatch.setattr(controller, "pp_prefetch_command_group", torch.distributed.new_group([0]))
    thread = threading.Thread(target=controller.pp_prefetch_command_thread_func, daemon=True)
    controller.pp_prefetch_command_thread = thread
    thread.start()
    handle = CacheRequestHandle("request", 0)
    controller.pp_prefetch_command_queue.put(PPPrefetchTicket(handle, TOKENS, None, [], [], ()))
    assert asked.wait(60)
    stopped_when_told = []
    join = thread.join
    stopped = controller.storage_stop_event
    monkeypatch.setattr(thread, "join", lambda timeout: (join(timeout), stopped_when_told.append(stopped.is_set())))
    getattr(controller, end)()  # raises where the thread does not come back
    assert stopped_when_told == [False], "the threads that go on with what it found are there until it is done"
    assert "the pool did not say" not in caplog.text


def test_a_load_that_nobody_waits_for_any_more_holds_up_no_flush(start, faults: Faults) -> None:
    """SGLang ends at a flush where its threads do not come back within 10 s, and takes an aborted load for none."""
    reader = start(load_deadline_s=600.0)
    controller, asked = reader.controller, threading.Event()
    faults.answer = lambda keys, found: Lookup(0, coming=len(keys))
    operation = controller.prefetch(CacheRequestHandle("request", 0), TOKENS[:FULL], None, [], None)
    assert controller.prefetch_hit_queue.get(timeout=60).storage_hit_count == FULL
    operation.host_indices = reader.host_pool.alloc(FULL)
    look_up = faults.answer
    faults.answer = lambda keys, found: asked.set() or look_up(keys, found)
    controller.prefetch_buffer.put(operation)
    assert asked.wait(60)
    controller.terminate_prefetch(operation)
    controller.reset()
