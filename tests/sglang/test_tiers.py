"""Pages that a tier is bringing: SGLang's prefetch thread counts on them, and its loads take them as they land."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from faults import Arrivals, Faults
from host_pools import PAGES, axes, mamba, mha, model, slots
from instances import keys
from prometheus_client import REGISTRY
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolHitPolicy, PoolName, PoolTransfer
from simulated.waiting import wait_for

import sglang_backend.states as states_module
import store_client.agent.clients as clients
from store_client.base import Lookup

NAMES = keys(PAGES)
KEYS = [bytes.fromhex(name) for name in NAMES]
WHOLE = list(range(PAGES))
OUTCOMES = ("promised", "landed", "lost")
STATES = PoolTransfer(PoolName.MAMBA, keys=NAMES[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
BEFORE = HiCacheStorageExtraInfo(prefix_keys=keys(2, "before"))


@pytest.fixture
def storage(attach, faults: Faults) -> Any:
    """A backend with all pages of its host pool in the store, none of which has landed; the host pool is blank."""
    host_pool = mha("page_first")
    axes(host_pool)[:] = model(1)
    # With nobody there to answer: what the tiers say is said by `Arrivals`.
    storage = attach(host_pool, load_deadline_s=40.0, lookup_wait_s=60.0, tiers=["mooncake"], agent="external")
    assert storage.batch_set_v1(NAMES, slots(WHOLE)) == [True] * PAGES
    axes(host_pool)[:] = 0
    faults.answer = Arrivals(KEYS)
    return storage


@pytest.fixture(autouse=True)
def _long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_backend.stored_pool.PAUSE_S", 600.0)


@pytest.fixture
def in_a_thread() -> Any:
    """SGLang asks from a thread of its own, which may wait."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *args: pool.submit(call, *args)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"mooncake_connector_{name}_total", labels) or 0.0


@pytest.fixture
def outcomes() -> Callable[[], list[float]]:
    """Pages promised, landed and lost since the test began."""
    before = [counted("tier_pages", outcome=outcome) for outcome in OUTCOMES]
    return lambda: [counted("tier_pages", outcome=name) - was for name, was in zip(OUTCOMES, before, strict=True)]


def right(storage: Any, count: int) -> bool:
    memory = axes(storage.mem_pool_host)
    return np.array_equal(memory[:count], model(1)[:count]) and not memory[count:].any()


def test_pages_that_are_coming_are_hits_and_are_loaded_as_they_land(
    storage: Any, faults: Faults, in_a_thread: Callable[..., Any], outcomes: Callable[[], list[float]]
) -> None:
    faults.answer.land(KEYS[:2])
    assert in_a_thread(storage.batch_exists, NAMES, BEFORE).result(60) == PAGES
    (_, asked, said), *_ = faults.announced
    assert asked == KEYS and said["parent"] == bytes.fromhex(keys(2, "before")[-1])
    load = in_a_thread(storage.batch_get_v1, NAMES, slots(WHOLE))
    for count in (2, 5, PAGES):
        faults.answer.land(KEYS[:count])
        wait_for(lambda count=count: right(storage, count))
    assert load.result(60) == [True] * PAGES
    assert outcomes() == [PAGES - 2, PAGES - 2, 0]


def test_sglangs_scheduler_is_told_of_what_is_there_alone(storage: Any, faults: Faults) -> None:
    faults.answer.land(KEYS[:2])
    assert storage.batch_exists(NAMES) == 2


@pytest.mark.parametrize("why", ["late", "lost"])
def test_what_does_not_land_is_computed_and_the_pool_goes_on_serving(
    storage: Any, faults: Faults, in_a_thread: Callable[..., Any], outcomes: Callable[[], list[float]], why: str
) -> None:
    faults.answer.land(KEYS[:3])
    assert in_a_thread(storage.batch_exists, NAMES).result(60) == PAGES
    load = in_a_thread(storage.batch_get_v1, NAMES, slots(WHOLE))
    loads = storage._movers.loads
    wait_for(lambda: loads.pending and loads.pending[0].awaits)
    if why == "late":
        loads.pending[0].deadline_s = 0.0
    else:
        faults.answer.promised.clear()
    assert load.result(60) == [True] * 3 + [False] * (PAGES - 3) and right(storage, 3)
    assert outcomes() == [PAGES - 3, 0, PAGES - 3]
    assert not loads.paused
    expected = 3 if why == "late" else PAGES
    faults.answer.promised.update(KEYS)
    assert in_a_thread(storage.batch_exists, NAMES).result(60) == expected
    faults.answer.land(KEYS)
    assert in_a_thread(storage.batch_exists, NAMES).result(60) == PAGES


def test_a_lookup_that_waits_for_the_tiers_is_counted(
    storage: Any, faults: Faults, in_a_thread: Callable[..., Any]
) -> None:
    waits, seconds = counted("tier_waits"), counted("tier_wait_seconds")
    answers = iter([Lookup(0, pending=True), Lookup(0, pending=True)])
    faults.answer = lambda keys, found: next(answers, Lookup(0))
    assert in_a_thread(storage.batch_exists, NAMES).result(60) == 0
    assert in_a_thread(storage.batch_exists, NAMES).result(60) == 0
    assert counted("tier_waits") - waits == 1 and counted("tier_wait_seconds") > seconds


def test_a_lookup_for_which_the_tiers_had_their_answer_did_not_wait(
    storage: Any, faults: Faults, in_a_thread: Callable[..., Any]
) -> None:
    storage.register_mem_host_pool_v2(mamba(), PoolName.MAMBA)
    waits = counted("tier_waits")

    def slow(keys: Any, found: Lookup) -> Lookup:
        time.sleep(0.01)
        return Lookup(0)

    faults.answer = slow
    assert in_a_thread(storage.batch_exists_v2, NAMES, [STATES]).result(60).kv_hit_pages == 0
    assert counted("tier_waits") == waits


def test_states_are_asked_for_no_further_than_the_tiers_answer_in_time(
    storage: Any, faults: Faults, in_a_thread: Callable[..., Any]
) -> None:
    storage._config = msgspec.structs.replace(storage._config, lookup_wait_s=0.05)  # for pools from now on
    storage.register_mem_host_pool_v2(mamba(), PoolName.MAMBA)
    asked, waits, late = set(), counted("tier_waits"), counted("failures", operation="lookup", cause="late")

    def silent(keys: Any, found: Lookup) -> Lookup:
        asked.update(keys)
        return Lookup(0, pending=True)

    faults.answer = silent
    assert in_a_thread(storage.batch_exists_v2, NAMES, [STATES]).result(60).kv_hit_pages == 0
    assert asked == set(KEYS[-9:]), "the last 8 and a window"
    assert counted("tier_waits") - waits == 1 == counted("failures", operation="lookup", cause="late") - late
    asked.clear()
    assert in_a_thread(storage.batch_exists_v2, NAMES, [STATES]).result(60).kv_hit_pages == 0
    assert not asked, "nothing is asked for that would not be waited for"


@pytest.mark.parametrize(("page_s", "rounds"), [(0.001, [9, 24, 96]), (0.01, [9, 24]), (0.2, [9])])
def test_more_states_are_asked_for_where_the_answers_come_within_what_is_left_of_the_wait(
    monkeypatch: pytest.MonkeyPatch, page_s: float, rounds: list[int]
) -> None:
    clock = SimpleNamespace(now_s=0.0, asked=[])

    class Pool:
        def contains(self, names: list[bytes]) -> list[bool]:
            return [False] * len(names)

        def each(self, names: list[bytes], wait_s: float) -> list[bool]:
            assert wait_s == pytest.approx(max(1.0 - clock.now_s, 0.0))
            clock.now_s += page_s * len(names)
            clock.asked.append(len(names))
            return [False] * len(names)

    monkeypatch.setattr(states_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    names = [bytes([number]) * 32 for number in range(200)]
    found = states_module.look_for_states([STATES], {PoolName.MAMBA: Pool()}, names, 1.0)
    assert found == {PoolName.MAMBA: [False] * 200} and clock.asked == rounds


def test_what_the_agent_did_not_do_is_among_the_failures(storage: Any) -> None:
    (client,) = clients._clients.values()
    wait_for(lambda: client.failures["agent_lost"])
    client.close()  # nothing is added any more
    before = counted("failures", operation="agent", cause="lost")
    storage.get_stats()
    storage.get_stats()
    assert counted("failures", operation="agent", cause="lost") - before == client.failures["agent_lost"]


@pytest.mark.parametrize("policy", [PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES], ids=["states", "all"])
def test_pools_beside_the_kv_are_fetched_with_it(
    storage: Any, faults: Faults, in_a_thread: Callable[..., Any], outcomes: Callable[[], list[float]],
    policy: PoolHitPolicy,
) -> None:  # fmt: skip
    states = mamba()
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    wanted = PoolTransfer(PoolName.MAMBA, host_indices=slots([0], 1), keys=NAMES[:1], hit_policy=policy)
    found = in_a_thread(storage.batch_exists_v2, NAMES, [wanted]).result(60)
    assert found.kv_hit_pages == PAGES
    few = policy == PoolHitPolicy.TRAILING_PAGES
    assert outcomes() == [PAGES + (9 if few else PAGES), 0, 0], "KV, and states of the last 8 pages and a window or all"
    faults.answer.promised.clear()
    assert in_a_thread(storage.batch_exists_v2, NAMES, [wanted]).result(60).kv_hit_pages == 0
