"""Lookups of a pool with tiers behind it: what they answer, what is asked of the agent, and what is not."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from agent.stand_in import CAPACITY, UNHEARD, StandIn, absent, configured, running, settled, space_of, tiered, until

from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.kv.namespace import private_model_digest
from store_client import EmbeddedStore, Lookup
from store_client.agent.places import Elsewhere
from store_client.agent.tiered import TieredStore
from store_client.agent.wish import Word
from store_client.open import open_store
from store_client.sharded import ShardView
from store_client.testing import PAGE_NBYTES, SHARD, MakeStore, StoreConformance, chain, namespace, put_chain

NOTHING = Lookup(0)


class TestTieredStore(StoreConformance):
    @pytest.fixture
    def make_store(self, pool: Path):
        with running(pool, StandIn(absent)):
            yield lambda: TieredStore(EmbeddedStore(pool, CAPACITY), configured(pool))


class TestTieredStoreWithoutAgent(StoreConformance):
    @pytest.fixture
    def make_store(self, pool: Path) -> MakeStore:
        return lambda: TieredStore(EmbeddedStore(pool, CAPACITY), configured(pool))


def test_a_configuration_with_tiers_opens_a_tiered_store_and_one_without_does_not(pool):
    with open_store(configured(pool)) as store, open_store(configured(pool, tiers=[])) as plain:
        assert isinstance(store, TieredStore) and isinstance(plain, EmbeddedStore)


def test_what_is_asked_is_what_the_pool_lacks_with_all_that_fetching_it_takes(pool):
    keys = chain("a", 6)
    with running(pool) as agent, tiered(pool) as store:
        put_chain(space_of(store), keys[:2])
        space_of(store).prefetch(keys, prefill_tokens_s=1234.5, deadline_s=7.0)
        wish = until(lambda: agent.fetches.asked)[0].wish
        assert (wish.namespace, wish.shard, list(wish.keys)) == (namespace(), SHARD, keys[2:])
        assert (wish.parent, wish.nbytes, wish.page_tokens) == (keys[1], PAGE_NBYTES, 64)
        assert (wish.deadline_s, wish.prefill_tokens_s) == (7.0, 1234.5)


def test_a_lookup_asks_as_well_with_the_speed_that_was_given_last(pool):
    keys, others = chain("a", 3), chain("b", 3)
    with running(pool) as agent, tiered(pool) as store:
        space_of(store).prefetch(keys, prefill_tokens_s=99.0)
        space_of(store).lookup(others)
        until(lambda: len(agent.fetches.asked) == 2)
        wish = agent.fetches.asked[1].wish
        assert (list(wish.keys), wish.parent, wish.prefill_tokens_s) == (others, None, 99.0)


def test_pages_that_are_coming_are_counted_and_those_that_landed_are_present(pool):
    keys = chain("a", 5)
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.lookup(keys)
        asked = until(lambda: agent.fetches.asked)[0]
        asked.tell(Word(coming=3))
        settled(space, keys, Lookup(0, True, 3))
        settled(space, keys[:2], Lookup(0, True, 2))
        settled(space, keys[1:], Lookup(0, True, 2))
        put_chain(store._inner.space(namespace(), SHARD), keys[:2])
        asked.tell(Word(coming=3, landed=2))
        settled(space, keys, Lookup(2, True, 1))
        asked.tell(Word(coming=2, landed=2, done=True, cause="timeout"))
        settled(space, keys, Lookup(2))


def test_once_it_is_settled_how_many_pages_come_the_answer_is_final(pool):
    keys = chain("a", 5)
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.lookup(keys)
        asked = until(lambda: agent.fetches.asked)[0]
        asked.tell(Word(coming=2))
        settled(space, keys, Lookup(0, True, 2))
        asked.tell(Word(coming=4, settled=True))
        settled(space, keys, Lookup(0, False, 4))


def test_an_agent_that_has_nothing_costs_no_further_lookup(pool):
    keys = chain("a", 5)
    with running(pool, StandIn(absent)) as agent, tiered(pool) as store:
        space_of(store).lookup(keys)
        until(lambda: agent.fetches.asked)
        settled(space_of(store), keys, NOTHING)


def test_without_a_word_from_the_agent_an_answer_is_soon_final(pool):
    keys = chain("a", 5)
    with running(pool) as agent, tiered(pool) as store:
        space_of(store).lookup(keys)
        until(lambda: agent.fetches.asked)
        settled(space_of(store), keys, UNHEARD)
        assert not agent.fetches.asked[0].cancelled


def test_a_chain_is_asked_for_once_by_whichever_parts_it_is_looked_up(pool):
    keys = chain("a", 40)
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.prefetch(keys)
        until(lambda: agent.fetches.asked)
        until(lambda: keys[-1] in space._asks)
        for _ in range(20):
            space.lookup(keys)
            space.lookup(keys[7:])
            space.lookup(keys[:9])
            space.prefetch(keys[3:])
        space.lookup(chain("end", 1))
        until(lambda: [asked for asked in agent.fetches.asked if list(asked.wish.keys) == chain("end", 1)])
        assert len(agent.fetches.asked) == 2


@pytest.mark.parametrize("shared", [1, 7, 39])
def test_a_chain_that_leaves_another_one_is_asked_for_from_there(pool, shared):
    keys = chain("a", 40)
    other = [*keys[:shared], *chain("b", 10)]
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.lookup(keys)
        until(lambda: agent.fetches.asked)[0].tell(Word(coming=40))
        settled(space, keys, Lookup(0, True, 40))
        space.lookup(other)
        until(lambda: len(agent.fetches.asked) == 2)
        wish = agent.fetches.asked[1].wish
        assert list(wish.keys) == other[shared:] and wish.parent == keys[shared - 1]
        agent.fetches.asked[1].tell(Word(coming=4))
        settled(space, other, Lookup(0, True, shared + 4))


def test_a_longer_chain_is_asked_for_behind_the_end_of_the_shorter(pool):
    keys = chain("a", 12)
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.lookup(keys[:5])
        until(lambda: agent.fetches.asked)[0].tell(Word(coming=5))
        settled(space, keys[:5], Lookup(0, True, 5))
        space.lookup(keys)
        until(lambda: len(agent.fetches.asked) == 2)
        assert list(agent.fetches.asked[1].wish.keys) == keys[5:]


def test_what_was_absent_is_asked_for_again_after_some_seconds(pool, monkeypatch):
    monkeypatch.setattr("store_client.agent.client._KEPT_S", 0.0)
    monkeypatch.setattr("store_client.agent.client._HOUSEKEEPING_S", 0.01)
    keys = chain("a", 3)
    with running(pool, StandIn(absent)) as agent, tiered(pool) as store:
        until(lambda: space_of(store).lookup(keys) is None or len(agent.fetches.asked) == 3)
        until(lambda: not space_of(store)._asks)


def test_an_ask_that_is_late_is_given_up(pool, monkeypatch):
    monkeypatch.setattr("store_client.agent.client._KEPT_S", 0.0)
    monkeypatch.setattr("store_client.agent.client._HOUSEKEEPING_S", 0.01)
    keys = chain("a", 3)
    with running(pool) as agent, tiered(pool) as store:
        space_of(store).prefetch(keys, deadline_s=0.01)
        asked = until(lambda: agent.fetches.asked)[0]
        until(lambda: asked.cancelled)
        assert store.stats().failures["agent_late"] >= 1


def test_nothing_is_asked_of_a_space_whose_page_size_is_not_known(pool):
    keys = chain("a", 3)
    with running(pool) as agent, tiered(pool) as store:
        unknown = store.space(namespace(), SHARD)
        assert unknown.lookup(keys) == NOTHING
        unknown.prefetch(keys)
        space_of(store).lookup(chain("end", 1))
        until(lambda: agent.fetches.asked)
        assert list(agent.fetches.asked[0].wish.keys) == chain("end", 1)


def test_nothing_is_asked_of_a_private_namespace_which_no_tier_has(pool):
    keys, private = chain("a", 3), replace(namespace(), model_digest=private_model_digest())
    with running(pool) as agent, tiered(pool) as store:
        space = store.space(private, SHARD, PAGE_NBYTES)
        put_chain(space, keys[:1])
        space.prefetch(keys)
        assert space.lookup(keys) == Lookup(1)
        space_of(store).lookup(chain("end", 1))
        until(lambda: agent.fetches.asked)
        assert list(agent.fetches.asked[0].wish.keys) == chain("end", 1)


def test_a_view_of_a_rank_asks_for_its_own_shard(pool):
    keys = chain("a", 3)
    with running(pool) as agent, tiered(pool) as store:
        view = ShardView(store, namespace(), SHARD, PAGE_NBYTES // SHARD.num_units)
        view.prefetch(keys)
        asked = until(lambda: agent.fetches.asked)[0]
        assert (asked.wish.shard, asked.wish.nbytes) == (SHARD, PAGE_NBYTES)
        asked.tell(Word(coming=2))
        until(lambda: view.lookup(keys) == Lookup(0, True, 2))


def test_without_an_agent_every_lookup_is_the_pools(pool):
    keys = chain("a", 3)
    with TieredStore(EmbeddedStore(pool, CAPACITY), configured(pool)) as store:
        put_chain(space_of(store), keys[:1])
        assert space_of(store).lookup(keys) == Lookup(1, unheard=True)
        until(lambda: store.stats().failures.get("agent_lost"))

def test_what_was_to_be_asked_when_the_connection_was_lost_is_asked_of_the_next_agent(pool):
    fetches = StandIn()
    fetches.elsewhere = [SHARD]
    with TieredStore(EmbeddedStore(pool, CAPACITY), configured(pool)) as store:
        known = store._client._places._elsewhere[namespace().digest] = Elsewhere(namespace())
        known.queued = True
        with running(pool, fetches):
            until(lambda: store.shards_elsewhere(namespace()) == [SHARD])


def test_when_the_agent_ends_what_was_coming_is_not_coming_any_more_and_the_next_one_is_asked_again(pool):
    keys = chain("a", 3)
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.lookup(keys)
        until(lambda: agent.fetches.asked)[0].tell(Word(coming=3))
        settled(space, keys, Lookup(0, True, 3))
        agent.stop()
        settled(space, keys, UNHEARD)
        assert agent.fetches.closed and agent.fetches.asked[0].cancelled
        with running(pool, StandIn(lambda asked: asked.tell(Word(coming=2)))) as second:
            settled(space, keys, Lookup(0, True, 2))
            assert len(second.fetches.asked) == 1

def test_a_forked_child_has_no_agent_and_opens_a_store_of_its_own(pool):
    """And the parent's connection stays what it was."""
    keys = chain("a", 3)
    with running(pool, StandIn(lambda asked: asked.tell(Word(coming=1)))) as agent, tiered(pool) as store:
        child = os.fork()
        if not child:
            status = 1
            try:
                assert not store._client.ready
                assert space_of(store).lookup(keys) == UNHEARD
                with tiered(pool) as own:
                    settled(space_of(own), keys, Lookup(0, True, 1))
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        until(lambda: agent.agent._report()["users"] == 1)
        settled(space_of(store), keys, Lookup(0, True, 1))


def test_a_child_that_outlives_its_parents_store_does_not_keep_the_connection(pool):
    with running(pool) as agent:
        with tiered(pool):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.read(read, 1)
                os._exit(0)
        until(lambda: agent.agent._report()["users"] == 0)
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)

def test_what_cannot_be_sent_costs_the_ask_alone(pool):
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.prefetch([chain("a", 1)[0], b"short"])
        space.prefetch(chain("b", 2), parent=b"short")
        space.prefetch(chain("c", 2), prefill_tokens_s=float("inf"), deadline_s=float("inf"))
        space.prefetch(chain("d", 2), prefill_tokens_s=float("nan"), deadline_s=-1.0)
        until(lambda: len(agent.fetches.asked) == 2)
        assert [asked.wish.keys[0] for asked in agent.fetches.asked] == [*chain("c", 1), *chain("d", 1)]
        assert agent.agent._report()["users"] == 1 and store._client.failures["agent_lost"] == 0


def test_a_defect_of_the_client_ends_no_thread(pool, monkeypatch):
    keys = chain("a", 3)
    with running(pool, StandIn(lambda asked: asked.tell(Word(coming=2)))), tiered(pool) as store:
        with monkeypatch.context() as broken:
            broken.setattr("store_client.agent.client.Client._words", lambda *args: 1 / 0)
            space_of(store).lookup(keys)
            until(lambda: store._client.failures["agent_error"])
        settled(space_of(store), keys, Lookup(0, True, 2))


def test_a_wrong_key_is_the_callers_mistake_as_everywhere(pool):
    with running(pool), tiered(pool) as store, pytest.raises(ValueError, match="expected 32"):
        space_of(store).lookup([b"x" * (KEY_NBYTES - 1)])

def test_an_agent_that_talks_nonsense_is_left_and_reached_again(pool, monkeypatch):
    keys = chain("a", 3)
    with running(pool, StandIn(lambda asked: asked.tell(Word(coming=2)))), tiered(pool) as store:
        with monkeypatch.context() as broken:
            broken.setattr("store_client.agent.messages.Frames.take", lambda self: b"nonsense")
            until(lambda: space_of(store).lookup(keys) and store._client.failures["agent_lost"])
        settled(space_of(store), keys, Lookup(0, True, 2))
