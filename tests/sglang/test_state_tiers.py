"""States of hybrid models from a tier: two backends with pools of their own, as on two hosts, and a shared folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_pools import PAGES, axes, bytes_of, fill_with, mamba, mha, model, slots
from instances import keys
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer, PoolTransferResult
from simulated.waiting import wait_for

from store_client.agent.visit import ask_report

NAMES = keys(PAGES)

Host = Callable[..., Any]


@pytest.fixture
def host(attach: Callable[..., Any], pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """`host(name, states)`: a backend of a model with KV and `states`, with a pool of its own."""
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 0.0)  # SGLang's thread waits for the first word anyway
    monkeypatch.setattr("store_client.agent.client._SILENT_S", 120.0)
    secret, shared = tmp_path / "secret", tmp_path / "shared"
    secret.write_bytes(b"0123456789abcdef" * 2)
    secret.chmod(0o600)
    shared.mkdir(mode=0o700)

    def start(name: str, states: Any, kind: PoolName = PoolName.MAMBA) -> Any:
        host_pool = mha("page_first")
        axes(host_pool)[:] = 0
        storage = attach(
            host_pool, pool=pool.with_name(name), agent="embedded", secret_file=str(secret), lookup_wait_s=60.0,
            tiers=[{"kind": "folder", "path": str(shared), "timeout_s": 60.0}], load_deadline_s=60.0,
        )  # fmt: skip
        storage.register_mem_host_pool_v2(host_pool, PoolName.KV)
        storage.register_mem_host_pool_v2(states, kind)
        wait_for(lambda: storage._store.store._client.ready)
        return storage

    return start


@pytest.fixture
def in_a_thread() -> Iterator[Callable[..., Any]]:
    """SGLang asks from a thread of its own, which may wait."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *args: pool.submit(call, *args).result(120)


def tier_of(storage: Any) -> dict[str, Any]:
    report = ask_report(storage._store.store.path)
    assert report is not None
    (tier,) = report["tiers"]
    return dict(tier)


def share(storage: Any, states: Any, kept: list[int], kind: PoolName = PoolName.MAMBA) -> dict[int, bytes]:
    """Store the KV of all pages, and the states of some; what they are."""
    axes(storage.mem_pool_host)[:] = model(1)
    assert all(storage.batch_set_v1(NAMES, slots(list(range(PAGES)))))
    made = {}
    for slot, page in enumerate(kept):
        made[page] = fill_with(states, slot, seed=page)
        given = PoolTransfer(kind, slots([slot], states.page_size), keys=[NAMES[page]])
        assert storage.batch_set_v2([given]) == {kind: [True]}
    wait_for(lambda: tier_of(storage)["written_pages"] == PAGES + len(kept))
    return made


def wanted(kind: PoolName = PoolName.MAMBA, window: int = 1) -> list[PoolTransfer]:
    return [PoolTransfer(kind, keys=NAMES[:window], hit_policy=PoolHitPolicy.TRAILING_PAGES)]


def test_kv_is_fetched_as_far_as_a_state_goes_and_both_are_loaded(host: Host, in_a_thread: Callable[..., Any]) -> None:
    states = mamba(slots=4)
    made = share(host("one", states), states, [3, 7])
    others = mamba(slots=4)
    other = host("other", others)
    found: PoolTransferResult = in_a_thread(other.batch_exists_v2, NAMES, wanted())
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (8, [4, 8])
    assert in_a_thread(other.batch_get_v1, NAMES[:8], slots(list(range(8)))) == [True] * 8
    memory = axes(other.mem_pool_host)
    assert np.array_equal(memory[:8], model(1)[:8]) and not memory[8:].any()
    loaded = PoolTransfer(PoolName.MAMBA, slots([2], others.page_size), keys=[NAMES[7]])
    assert in_a_thread(other.batch_get_v2, [loaded]) == {PoolName.MAMBA: [True]}
    assert bytes_of(others, 2) == made[7] != made[3]
    assert tier_of(other)["fetched_pages"] == 8 + 2


def test_kv_without_any_state_is_left_where_it_is(host: Host, in_a_thread: Callable[..., Any]) -> None:
    states = mamba(slots=4)
    share(host("one", states), states, [])
    other = host("other", mamba(slots=4))
    found = in_a_thread(other.batch_exists_v2, NAMES, wanted())
    assert found.kv_hit_pages == 0 and tier_of(other)["fetched_pages"] == 0
    assert in_a_thread(other.batch_exists, NAMES) == PAGES, "it is there"


def test_a_window_counts_where_all_its_pages_are(host: Host, in_a_thread: Callable[..., Any]) -> None:
    window = mha("page_first", heads=2)
    share(host("one", window, PoolName.SWA), window, [2, 3, 4, 8], PoolName.SWA)
    other = host("other", mha("page_first", heads=2), PoolName.SWA)
    found = in_a_thread(other.batch_exists_v2, NAMES, wanted(PoolName.SWA, 3))
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [5])


def test_sglangs_scheduler_has_no_state_fetched(host: Host) -> None:
    states = mamba(slots=4)
    share(host("one", states), states, [3])
    other = host("other", mamba(slots=4))
    assert other.batch_exists_v2(NAMES, wanted()).kv_hit_pages == 0
    assert tier_of(other)["asked_pages"] == 0
