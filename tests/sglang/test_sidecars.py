"""Pools beside the model's KV cache: what SGLang calls the v2 interface, over its real pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from host_pools import MHA_LAYOUTS, MLA_LAYOUTS, PAGES, bytes_of, fill_with, indexer, mamba, mha, mla, slots
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from instances import keys, server, storage_config
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

from store_client.embedded import EmbeddedStore

ALL, TRAILING, GROUPS = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.BLOCK_GROUPS


def dsa(layout: str) -> Any:
    with server("deepseek-mla"):
        return indexer(mla(layout, page_tokens=64))


SIDECARS = {
    "mamba": (PoolName.MAMBA, mamba),
    "mamba without temporal state": (PoolName.MAMBA, lambda: mamba(temporal=(0,))),
    "mamba with state of the slot": (PoolName.MAMBA, lambda: mamba(extra=True)),
    **{f"swa {layout}": (PoolName.SWA, lambda layout=layout: mha(layout, heads=2)) for layout in MHA_LAYOUTS},
    **{f"mla draft {layout}": (PoolName.DRAFT, lambda layout=layout: mla(layout)) for layout in MLA_LAYOUTS},
    **{f"indexer {layout}": (PoolName.INDEXER, lambda layout=layout: dsa(layout)) for layout in MLA_LAYOUTS},
}


def transfer(
    name: PoolName, pool: Any, names: list[str], pages: list[int], policy: PoolHitPolicy = ALL
) -> PoolTransfer:
    return PoolTransfer(name, host_indices=slots(pages, pool.page_size), keys=names, hit_policy=policy)


def beside(attach: Any, name: PoolName, sidecar: Any, **options: Any) -> Any:
    """A backend with `sidecar` beside an MHA pool, registered as SGLang's controller does."""
    host_pool = options.pop("anchor", None) or mha("page_first")
    storage = attach(host_pool, **options)
    storage.register_mem_host_pool_v2(host_pool, PoolName.KV)
    storage.register_mem_host_pool_v2(sidecar, name)
    return storage


@pytest.mark.parametrize("kind", SIDECARS)
def test_the_state_of_every_pool_comes_back(attach, kind: str) -> None:
    name, make = SIDECARS[kind]
    source, target, names = make(), make(), keys(2)
    written = [fill_with(source, page, seed=page) for page in (3, 1)]
    untouched = fill_with(target, 4, seed=9)
    storage = beside(attach, name, source)
    assert storage.batch_set_v2([transfer(name, source, names, [3, 1])]) == {name: [True, True]}
    storage = beside(attach, name, target)
    assert storage.batch_get_v2([transfer(name, target, names, [0, 2])]) == {name: [True, True]}
    assert [bytes_of(target, 0), bytes_of(target, 2)] == written and written[0] != written[1]
    assert bytes_of(target, 4) == untouched


@pytest.mark.parametrize("kind", ["mamba", "swa page_first", "indexer layer_first"])
def test_pages_that_are_missing_are_reported_one_by_one(attach, kind: str) -> None:
    name, make = SIDECARS[kind]
    source, names = make(), keys(3)
    storage = beside(attach, name, source)
    storage.batch_set_v2([transfer(name, source, names[:2], [0, 1])])
    assert storage.batch_get_v2([transfer(name, source, names, [0, 1, 2])]) == {name: [True, True, False]}
    assert storage.batch_get_v2([PoolTransfer(name, host_indices=slots([0], 1)[:0], keys=names)]) == {name: [False] * 3}
    assert storage.batch_get_v2([PoolTransfer(name, host_indices=None, keys=names)]) == {name: [False] * 3}
    assert storage.batch_set_v2([PoolTransfer(PoolName.DRAFT_SWA, slots([0], 1), keys=names)]) == {
        PoolName.DRAFT_SWA: [False] * 3
    }


def test_pools_of_one_instance_do_not_mix(attach) -> None:
    """An SWA pool and a draft's pool of the same shape, and the KV pages, all under the same keys."""
    anchor, swa, draft = mha("page_first"), mha("page_first"), mha("page_first")
    storage = beside(attach, PoolName.SWA, swa, anchor=anchor)
    storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    contents = [fill_with(pool, 0, seed) for seed, pool in enumerate((anchor, swa, draft))]
    storage.batch_set_v1(keys(1), slots([0]))
    transfers = [transfer(PoolName.SWA, swa, keys(1), [0]), transfer(PoolName.DRAFT, draft, keys(1), [0])]
    storage.batch_set_v2(transfers)
    for pool in (anchor, swa, draft):
        fill_with(pool, 0, 7)
    storage.batch_get_v1(keys(1), slots([0]))
    storage.batch_get_v2(transfers)
    assert [bytes_of(pool, 0) for pool in (anchor, swa, draft)] == contents


def test_a_pool_of_another_layout_or_rank_does_not_read_them(attach) -> None:
    def hits(**options: Any) -> int:
        storage = beside(attach, PoolName.SWA, mha(options.pop("layout", "page_first"), heads=2), **options)
        storage.batch_set_v1(keys(1), slots([0]))
        asked = [PoolTransfer(PoolName.SWA, keys=keys(1), hit_policy=ALL)]
        return storage.batch_exists_v2(keys(1), asked).kv_hit_pages

    source = mha("page_first", heads=2)
    storage = beside(attach, PoolName.SWA, source)
    storage.batch_set_v2([transfer(PoolName.SWA, source, keys(1), [0])])
    assert hits() == 1
    assert hits(layout="page_head") == 0
    assert hits(tp=(1, 2)) == 0
    assert hits(model_id="other") == 0


def test_states_of_another_type_are_not_read_though_they_have_the_same_size(attach) -> None:
    source, names = mamba(dtype=torch.bfloat16), keys(1)
    storage = beside(attach, PoolName.MAMBA, source)
    assert storage.batch_set_v2([transfer(PoolName.MAMBA, source, names, [0])]) == {PoolName.MAMBA: [True]}
    for dtype, found in ((torch.bfloat16, True), (torch.float16, False)):
        target = mamba(dtype=dtype)
        reader = beside(attach, PoolName.MAMBA, target)
        assert reader.batch_get_v2([transfer(PoolName.MAMBA, target, names, [0])]) == {PoolName.MAMBA: [found]}


@pytest.mark.parametrize("name, make, shared", [
    (PoolName.INDEXER, lambda: dsa("page_first"), True),
    (PoolName.DRAFT, lambda: mla("page_first"), True),
    (PoolName.DRAFT, lambda: mha("page_first"), False),
    (PoolName.MAMBA, mamba, False),
], ids=["indexer", "mla draft", "mha draft", "mamba"])  # fmt: skip
def test_ranks_of_an_mla_model_share_what_all_of_them_have(attach, name, make, shared: bool) -> None:
    """SGLang lets rank 0 alone write what every rank has; the others must find it."""
    source = make()
    storage = beside(attach, name, source, anchor=mla("page_first"), tp=(0, 2))
    storage.batch_set_v1(keys(1), slots([0]))
    storage.batch_set_v2([transfer(name, source, keys(1), [0])])
    follower = beside(attach, name, make(), anchor=mla("page_first"), tp=(1, 2))
    found = follower.batch_exists_v2(keys(1), [PoolTransfer(name, keys=keys(1), hit_policy=TRAILING)])
    assert found.kv_hit_pages == int(shared)


policies = st.sampled_from([ALL, TRAILING])
present = st.lists(st.booleans(), min_size=6, max_size=6)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    kv=st.integers(0, 6),
    sidecars=st.lists(st.tuples(present, policies, st.integers(1, 4)), max_size=2),
    request=st.integers(1, 6),
)
def test_lookups_agree_with_sglangs_file_backend(
    attach, tmp_path_factory, kv: int, sidecars: list[tuple[list[bool], PoolHitPolicy, int]], request: int
) -> None:
    host_pool, names = mha("page_first"), keys(6)
    ours = attach(host_pool, model_id=f"{kv}{sidecars}")
    theirs = HiCacheFile(storage_config(), str(tmp_path_factory.mktemp("file")))
    theirs.register_mem_pool_host(host_pool)
    asked = []
    for storage in (ours, theirs):
        storage.register_mem_host_pool_v2(host_pool, PoolName.KV)
        storage.batch_set_v2([transfer(PoolName.KV, host_pool, names[:kv], list(range(kv)))] if kv else [])
    for name, (there, policy, window) in zip((PoolName.SWA, PoolName.DRAFT), sidecars, strict=False):
        sidecar = mha("page_first", heads=1)
        for storage in (ours, theirs):
            storage.register_mem_host_pool_v2(sidecar, name)
            pages = [page for page in range(6) if there[page]]
            storage.batch_set_v2([transfer(name, sidecar, [names[page] for page in pages], pages)] if pages else [])
        asked.append(PoolTransfer(name, keys=names[:request][-window:], hit_policy=policy))
    mine, its = ours.batch_exists_v2(names[:request], asked), theirs.batch_exists_v2(names[:request], asked)
    assert mine.kv_hit_pages == its.kv_hit_pages
    assert mine.restorable_prefix_pages == its.restorable_prefix_pages
    if its.kv_hit_pages:
        assert mine.extra_pool_hit_pages == its.extra_pool_hit_pages


def test_block_groups_never_decide_about_the_kv_pages(attach) -> None:
    sidecar = mha("page_first", heads=1)
    storage = beside(attach, PoolName.SWA, sidecar)
    storage.batch_set_v1(keys(3), slots([0, 1, 2]))
    asked = [PoolTransfer(PoolName.SWA, keys=keys(3), hit_policy=GROUPS, block_pages=1, group_pages=1)]
    found = storage.batch_exists_v2(keys(3), asked)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (3, {PoolName.KV: 3})


def test_a_pool_that_cannot_be_stored_is_a_miss_for_the_whole_request(attach, caplog) -> None:
    storage = beside(attach, PoolName.SWA, object())
    storage.batch_set_v1(keys(2), slots([0, 1]))
    assert storage.batch_exists(keys(2)) == 2
    assert storage.batch_exists_v2(keys(2), [PoolTransfer(PoolName.SWA, keys=keys(1))]).kv_hit_pages == 0
    assert "register_mem_host_pool_v2 failed" in caplog.text


class TestLogicalAnchor:
    """DeepSeek V4: the anchor has slots and no bytes; everything is in the pools beside it."""

    def attached(self, attach: Any, sidecar: Any) -> Any:
        anchor = LogicalHostPool(PAGES * 16, 16)
        return beside(attach, PoolName.DEEPSEEK_V4_C4, sidecar, anchor=anchor, is_mla=True)

    def test_there_is_what_the_other_pools_have(self, attach) -> None:
        sidecar = mha("page_first")
        storage = self.attached(attach, sidecar)
        asked = [PoolTransfer(PoolName.DEEPSEEK_V4_C4, keys=keys(4), hit_policy=ALL)]
        assert storage.batch_exists_v2(keys(4), asked).kv_hit_pages == 0
        storage.batch_set_v2([transfer(PoolName.DEEPSEEK_V4_C4, sidecar, keys(3), [0, 1, 2])])
        assert storage.batch_set_v1(keys(3), slots([0, 1, 2])) == [True] * 3
        assert storage.batch_exists_v2(keys(4), asked).restorable_prefix_pages == [1, 2, 3]
        assert storage.batch_get_v1(keys(3), slots([0, 1, 2])) == [True] * 3

    def test_alone_it_has_nothing(self, attach) -> None:
        storage = self.attached(attach, mha("page_first"))
        assert storage.batch_exists(keys(2)) == 0 and not storage.exists(keys(1)[0])


def test_states_are_kept_in_a_full_pool(attach, pool: Path) -> None:
    """Mamba stores a state here and there: the page before it has none, and the newest state must push out old ones."""
    states = mamba()
    storage = beside(attach, PoolName.MAMBA, states, capacity=1 << 20)
    names = keys(600)
    for start in range(5, 600, 2):
        before = HiCacheStorageExtraInfo(prefix_keys=names[:start])
        done = storage.batch_set_v2([transfer(PoolName.MAMBA, states, names[start : start + 1], [0])], before)
        assert done == {PoolName.MAMBA: [True]}
    with EmbeddedStore(pool) as store:
        assert store.stats().evicted_pages > 0
    assert storage.batch_get_v2([transfer(PoolName.MAMBA, states, [names[start]], [1])]) == {PoolName.MAMBA: [True]}
