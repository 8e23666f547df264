"""What is cleared in a pool with tiers behind it does not come back from them, whenever an agent runs."""

from __future__ import annotations

import pytest
from agent.stand_in import CAPACITY, StandIn, absent, configured, running, settled, space_of, tiered, until

from store_client import EmbeddedStore, Lookup
from store_client.agent import forget
from store_client.agent.forget import Forgetting, marks
from store_client.agent.tiered import TieredStore
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain

NOTHING = Lookup(0)


def test_pages_that_were_cleared_do_not_come_back(pool):
    keys = chain("a", 3)
    digest = namespace().digest
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        put_chain(space, keys)
        assert space.clear() == 3
        until(lambda: agent.fetches.cleared and not marks(pool))
        assert set(agent.fetches.cleared) == {digest}
        put_chain(space, keys)
        assert store.clear() == 3
        until(lambda: None in agent.fetches.cleared and not marks(pool))
        assert set(agent.fetches.cleared) == {digest, None}


@pytest.mark.parametrize("what", ["space", "store"])
def test_what_a_tier_was_given_before_the_pool_was_clear_is_forgotten_as_well(pool, monkeypatch, what):
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        inner, outer = (space._inner, space) if what == "space" else (store._inner, store)
        clear = inner.clear

        def clear_late() -> int:
            until(lambda: agent.fetches.cleared and not marks(pool))
            agent.fetches.cleared.clear()
            return clear()

        monkeypatch.setattr(inner, "clear", lambda *_: clear_late())
        put_chain(space, chain("a", 3))
        assert outer.clear() == 3
        until(lambda: agent.fetches.cleared and not marks(pool), "the tiers are not told again")


def test_what_is_cleared_while_no_agent_runs_is_forgotten_by_the_next_one_before_it_fetches(pool):
    keys, other = chain("a", 3), namespace("other")
    with TieredStore(EmbeddedStore(pool, CAPACITY), configured(pool)) as store:
        space_of(store).clear()
    fetches = StandIn(absent)
    fetches.broken = RuntimeError("the tier does not answer")
    with running(pool, fetches), tiered(pool) as store:
        space_of(store).lookup(keys)
        store.space(other, SHARD, PAGE_NBYTES).lookup(keys)
        until(lambda: fetches.asked)
        assert [asked.wish.namespace for asked in fetches.asked] == [other]
        settled(space_of(store), keys, NOTHING)
    fetches.broken = None
    with running(pool, fetches):
        until(lambda: fetches.cleared == [namespace().digest])


def test_who_connects_has_the_agent_look_for_marks_at_once(pool, monkeypatch):
    monkeypatch.setattr(Forgetting, "tick", lambda self: None)
    with running(pool) as agent:
        forget.mark(pool, namespace().digest)  # by a process that was not connected
        with tiered(pool):
            until(lambda: agent.fetches.cleared == [namespace().digest])


def test_what_a_fetch_brought_after_a_clear_is_cleared_as_well(pool):
    keys = chain("a", 3)
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.lookup(keys)
        until(lambda: agent.fetches.asked)
        agent.fetches.broken = RuntimeError("not yet")
        space.clear()
        put_chain(store._inner.space(namespace(), SHARD), keys)  # as a fetch does
        agent.fetches.broken = None
        agent.agent._forgetting._again_s = 0.0
        until(lambda: agent.fetches.cleared)
        until(lambda: space.contains(keys) == [False] * 3)
