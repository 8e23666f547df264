"""What is marked is forgotten in each tier once for each clear, whatever else happens meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent.flows import flowing, put_into, wait_until
from agent.memory_tier import MemoryTier
from causes import forget_causes

from store_client import EmbeddedStore
from store_client.agent.flow import Flow
from store_client.agent.forget import Forgetting, mark, marks
from store_client.testing import SHARD, chain, namespace, put_chain
from store_client.tiers.base import TierError

DIGEST = namespace().digest


@pytest.fixture(autouse=True)
def causes() -> None:
    forget_causes()


def forgetting_for(pool: Path, store: EmbeddedStore, flow: Flow, asked: list[bool] | None = None) -> Forgetting:
    """`asked`: whether pages are being fetched, the first times that it is asked; then none are."""
    left = iter(asked or [])
    return Forgetting(pool, store, flow, lambda _: next(left, False))


def forget(forgetting: Forgetting) -> None:
    """Look, and wait until the attempt is over."""
    forgetting._again_s = 0.0
    forgetting.tick()
    wait_until(lambda: forgetting._thread is None or not forgetting._thread.is_alive())


@pytest.fixture
def broken() -> MemoryTier:
    tier = MemoryTier()
    tier.failing = TierError("the credentials have expired", "denied")
    return tier


def test_a_tier_that_is_broken_does_not_have_the_others_forget_again_and_again(pool, store, broken):
    healthy, new, newer = MemoryTier(), chain("new", 3), chain("newer", 2)
    put_into(healthy, chain("old", 3))
    with flowing(store, broken, healthy) as flow:
        forgetting = forgetting_for(pool, store, flow)
        mark(pool, DIGEST)
        forget(forgetting)
        assert healthy.stored() == []
        put_into(healthy, new)  # by any host that shares it
        for _ in range(3):
            forget(forgetting)
        assert len(broken.made("clear")) == 4 and healthy.stored() == new
        assert forgetting.is_forgotten(DIGEST) and marks(pool)
        mark(pool, DIGEST)
        forget(forgetting)
        assert healthy.stored() == [], "another clear is one for all tiers"
        put_into(healthy, newer)
        assert len(marks(pool)) == 1, "marks do not pile up"
        broken.failing = None
        forget(forgetting)
        assert not marks(pool) and not forgetting.is_forgotten(DIGEST)
        assert healthy.stored() == newer


def test_what_is_cleared_while_the_tiers_forget_is_forgotten_once_more(pool, store):
    first, second, more = MemoryTier(), MemoryTier(), chain("more", 2)
    with flowing(store, first, second) as flow:
        forgetting = forgetting_for(pool, store, flow)

        def clear_again() -> None:
            second.before.clear()
            put_into(first, more)
            mark(pool, DIGEST)
            forgetting.look()

        second.before["clear"] = clear_again
        mark(pool, DIGEST)
        forget(forgetting)
        assert first.stored() == [] and len(first.made("clear")) == 2
        assert not marks(pool) and not forgetting.is_forgotten(DIGEST)


def test_a_mark_that_nobody_told_of_is_found(pool, store):
    tier = MemoryTier()
    put_into(tier, chain("a", 2))
    with flowing(store, tier) as flow:
        forgetting = forgetting_for(pool, store, flow)
        forgetting.look()
        mark(pool, None)
        forget(forgetting)
        assert tier.stored() == [] and not marks(pool)


def test_a_mark_of_the_former_name_is_one_too(pool, store):
    tier = MemoryTier()
    put_into(tier, chain("a", 2))
    (pool / f"agent.forget.{DIGEST.hex()}").touch()
    with flowing(store, tier) as flow:
        forget(forgetting_for(pool, store, flow))
        assert tier.stored() == [] and not marks(pool)


def test_what_a_fetch_brought_before_the_mark_was_seen_goes_although_a_tier_is_broken(pool, store, broken):
    """And only that: what is stored afterwards stays."""
    space, keys = store.space(namespace(), SHARD), chain("a", 3)
    with flowing(store, broken) as flow:
        forgetting = forgetting_for(pool, store, flow, [True])
        put_chain(space, keys)
        mark(pool, DIGEST)
        forget(forgetting)
        assert space.contains(keys) == [False] * 3
        put_chain(space, keys)
        forget(forgetting)
        assert space.contains(keys) == [True] * 3


def test_a_pool_that_could_not_be_cleared_is_cleared_by_the_next_attempt(pool, store, monkeypatch):
    tier, keys = MemoryTier(), chain("a", 3)
    with flowing(store, tier) as flow:
        forgetting = forgetting_for(pool, store, flow, [True])
        put_chain(store.space(namespace(), SHARD), keys)
        mark(pool, DIGEST)
        with monkeypatch.context() as locked:
            locked.setattr(store, "clear", lambda _: 1 / 0)
            forget(forgetting)
        assert marks(pool) and store.stats().pages == 3
        forget(forgetting)
        assert not marks(pool) and store.stats().pages == 0


def test_a_mark_that_somebody_else_removes_is_put_back_until_all_tiers_have_forgotten(pool, store, broken):
    with flowing(store, broken) as flow:
        forgetting = forgetting_for(pool, store, flow)
        mark(pool, DIGEST)
        forget(forgetting)
        (name,) = marks(pool)
        (pool / name).unlink()
        forgetting.tick()
        assert list(marks(pool)) == [name]
    with flowing(store, tier := MemoryTier()) as flow:  # of the next agent
        put_into(tier, chain("old", 3))
        forget(forgetting_for(pool, store, flow))
        assert tier.stored() == [] and not marks(pool)


def test_no_mark_is_put_back_into_a_folder_that_somebody_deletes(pool, store, broken):
    """Their files are listed, and go one by one: a mark that comes back behind their back would hold up the folder."""
    answers = iter([True, False])  # before the mark is written, and after
    with flowing(store, broken) as flow:
        forgetting = forgetting_for(pool, store, flow)
        mark(pool, DIGEST)
        forget(forgetting)
        (name,) = marks(pool)
        (pool / name).unlink()
        forgetting._is_current = lambda: next(answers)
        forgetting._read()
        assert not marks(pool) and next(answers, None) is None


def test_the_agent_of_a_pool_that_was_replaced_leaves_the_marks_to_the_next_one(pool, store):
    tier, is_current = MemoryTier(), [True]
    with flowing(store, tier) as flow:
        forgetting = Forgetting(pool, store, flow, lambda _: False, lambda: is_current[0])
        mark(pool, DIGEST)
        is_current[0] = False
        put_into(tier, chain("old", 3))
        forget(forgetting)
        assert tier.stored() == [] and marks(pool) and forgetting.is_forgotten(DIGEST)
        is_current[0] = True
        forget(forgetting)
        assert not marks(pool)
