"""What is asked for comes from the nearest tier that has it, right and once, or is said not to come."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
from agent.flows import ask, fetch, flowing, is_right, put_into, settings, wait_until, wish_for
from agent.memory_tier import MemoryTier
from lock_holder import stopped_holder
from store.audit import audit
from store.pools import CAPACITY, space_in

from store_client import EmbeddedStore
from store_client.embedded.locks import FileLock
from store_client.testing import PAGE_NBYTES, chain, namespace, put_chain


def test_pages_of_a_tier_are_in_the_pool_once_they_are_told_to_have_landed(store, space, tier):
    keys = chain("a", 30)
    put_into(tier, keys)
    with flowing(store, tier) as flow:
        word, heard = fetch(flow, keys)
    assert (word.coming, word.landed, word.cause) == (30, 30, "")
    assert all(is_right(space, key) for key in keys)
    landed = [word.landed for word in heard.words]
    assert landed == sorted(landed) and len(set(landed)) > 2, "they land a batch at a time"
    assert all(word.coming >= word.landed for word in heard.words)
    assert heard.words[0].coming > 0 and heard.words[0].landed == 0, "that they are coming is said first"
    audit(store)


def test_who_moves_bytes_gives_way_and_who_has_the_write_lock_meanwhile_does_not(store, space, tier, monkeypatch):
    def weight() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    own, reading, locking, acquire = weight(), [], [], FileLock.acquire
    keys = chain("a", 30)
    put_into(tier, keys)
    tier.before["read"] = lambda: reading.append(weight())
    monkeypatch.setattr(FileLock, "acquire", lambda *given: locking.append(weight()) or acquire(*given))
    with flowing(store, tier) as flow:
        assert fetch(flow, keys)[0].landed == 30
        assert set(reading) == {min(own + 10, 19)}
        assert len(locking) >= 2 * len(reading) and set(locking) == {own}


def test_a_chain_goes_on_in_another_tier(store, space):
    near, far = MemoryTier(), MemoryTier()
    keys = chain("a", 30)
    put_into(near, [*keys[:10], *keys[20:]])
    put_into(far, keys[10:21])
    with flowing(store, near, far) as flow:
        assert fetch(flow, keys)[0].landed == 30
    assert all(is_right(space, key) for key in keys)
    assert sorted(key for read in far.made("read") for key in read) == sorted(keys[10:20]), "nearest first"


def test_a_miss_costs_a_question_of_a_few_keys(store, tier):
    with flowing(store, tier) as flow:
        word, heard = fetch(flow, chain("a", 1000))
    assert (word.coming, word.landed, word.cause) == (0, 0, "empty") and len(heard.words) == 1
    assert [len(keys) for keys in tier.made("contains")] == [4]
    assert tier.made("read") == []


def test_what_the_pool_has_is_not_fetched(store, space, tier):
    keys = chain("a", 12)
    put_into(tier, keys)
    put_chain(space, keys[:5])
    with flowing(store, tier) as flow:
        assert fetch(flow, keys)[0].landed == 12
        assert sorted(key for read in tier.made("read") for key in read) == sorted(keys[5:])
        asked = len(tier.made("contains"))
        word, heard = fetch(flow, keys)
        assert word.landed == 12 and len(heard.words) == 1
        assert len(tier.made("contains")) == asked


def test_a_page_that_several_want_is_fetched_once(store, tier):
    keys = chain("a", 12)
    put_into(tier, keys)
    tier.deaf.add("read")
    with flowing(store, tier) as flow:
        asks = [ask(flow, keys[:8]), ask(flow, keys), ask(flow, keys[:3])]
        for (_, heard), count in zip(asks, (8, 12, 3), strict=True):
            heard.wait(lambda word, count=count: word.coming == count)
        tier.listen.set()
        assert [heard.end().landed for _, heard in asks] == [8, 12, 3]
    assert sorted(key for read in tier.made("read") for key in read) == sorted(keys)


def test_who_gives_up_does_not_take_it_from_others(store, space, tier):
    keys = chain("a", 8)
    put_into(tier, keys)
    tier.deaf.add("read")
    with flowing(store, tier) as flow:
        first, first_heard = ask(flow, keys)
        _, second_heard = ask(flow, keys[:6])
        for heard, count in ((first_heard, 8), (second_heard, 6)):
            heard.wait(lambda word, count=count: word.coming == count)
        first.cancel()
        tier.listen.set()
        assert second_heard.end().landed == 6
        assert not first_heard.words[-1].done, "nothing is told after a cancel"
    assert space.lookup(keys).pages >= 6


def test_what_nobody_wants_any_more_is_not_fetched(store, space):
    tier = MemoryTier(batch_nbytes=PAGE_NBYTES, parallel=1)
    keys, others = chain("a", 8), chain("b", 1)
    put_into(tier, [*keys, *others])
    tier.deaf.add("read")
    with flowing(store, tier) as flow:
        wish, heard = ask(flow, keys)
        heard.wait(lambda word: word.coming == 8)
        wait_until(lambda: tier.made("read"))
        wish.cancel()
        tier.listen.set()
        assert fetch(flow, others)[0].landed == 1
    assert tier.made("read") == [(keys[0],), (others[0],)]


def test_at_its_deadline_a_wish_ends_with_what_has_landed(store, tier):
    keys = chain("a", 8)
    put_into(tier, keys)
    tier.before["read"] = lambda: len(tier.made("read")) > 1 and tier.deaf.add("read")
    with flowing(store, tier) as flow:
        word, _ = fetch(flow, keys, deadline_s=1.0)
    assert word.cause == "late" and word.landed in (0, 4) and word.coming == word.landed

def test_close_closes_the_tiers(store, tier):
    with flowing(store, tier) as flow:
        fetch(flow, chain("a", 4))
        flow.close()
        flow.close()
    assert tier.is_closed

def test_namespaces_and_sizes_are_told_apart(store, tier):
    keys = chain("a", 2)
    put_into(tier, keys, name=namespace("other"))
    put_into(tier, chain("b", 2), nbytes=4096)
    with flowing(store, tier) as flow:
        assert fetch(flow, keys)[0].landed == 0
        assert fetch(flow, keys, namespace=namespace("other"))[0].landed == 2
        assert fetch(flow, chain("b", 2))[0].landed == 0
        assert fetch(flow, chain("b", 2), nbytes=4096)[0].landed == 2


@pytest.mark.parametrize("how", ["flow", "pool", "namespace"])
def test_nothing_is_published_that_was_asked_for_before_a_clear(store, space, tier, how):
    keys = chain("a", 8)
    put_into(tier, keys)
    tier.deaf = {"read"}
    with flowing(store, tier) as flow:
        _, heard = ask(flow, keys)
        heard.wait(lambda word: word.coming == 8)
        wait_until(lambda: tier.made("read"))
        if how == "flow":
            assert flow.clear(namespace().digest, set()) == 8
            put_into(tier, keys)
        elif how == "pool":
            store.clear()
        else:
            store.clear(namespace().digest)
        tier.listen.set()
        assert (heard.end().landed, heard.end().cause) == (0, "forgotten")
        wait_until(lambda: flow.stats()[0].queued_pages == 0)
        assert space.contains(keys) == [False] * 8
        tier.deaf.clear()
        assert fetch(flow, keys)[0].landed == 8, "what is asked for after it comes"
    audit(store)


def test_clear_of_one_namespace_leaves_the_others(store, tier):
    keys, other = chain("a", 4), namespace("other")
    put_into(tier, keys)
    put_into(tier, keys, name=other)
    with flowing(store, tier) as flow:
        assert flow.clear(other.digest, set()) == 4
        assert fetch(flow, keys)[0].landed == 4
        assert fetch(flow, keys, namespace=other)[0].landed == 0
        assert flow.clear(None, set()) == 4

def test_a_full_pool_makes_room_for_the_whole_chain(store, space, tier):
    put_chain(space_in(store, "old"), chain("old", CAPACITY // PAGE_NBYTES))
    keys = chain("a", 40)
    put_into(tier, keys)
    with flowing(store, tier) as flow:
        assert fetch(flow, keys)[0].landed == 40
    assert store.stats().evicted_pages >= 40


def test_a_chain_that_is_longer_than_the_pool_ends_where_the_pool_does(pool, tier):
    keys = chain("a", 60)
    put_into(tier, keys)
    with EmbeddedStore(pool, 32 * PAGE_NBYTES) as store:
        with flowing(store, tier) as flow:
            word, _ = fetch(flow, keys)
            assert word.done and word.landed > 0
        audit(store)  # the word comes before what was reserved is given back


def test_a_pool_that_is_locked_is_busy(pool, store, tier):
    keys = chain("a", 4)
    put_into(tier, keys)
    with flowing(store, tier) as flow:
        with stopped_holder(pool):
            assert fetch(flow, keys, deadline_s=60.0)[0].cause == "busy"
        assert fetch(flow, keys)[0].landed == 4


def test_what_takes_longer_than_computing_is_not_fetched(store, tier):
    keys, others = chain("a", 4), chain("b", 400)
    put_into(tier, [*keys, *others])
    with flowing(store, tier) as flow:
        assert fetch(flow, keys, prefill_tokens_s=1e15)[0].landed == 4, "how fast it is was not known"
        word, _ = fetch(flow, others, prefill_tokens_s=1e15)
        assert (word.coming, word.landed, word.cause) == (0, 0, "not_worth_it")
        assert flow.stats()[0].not_worth_it_pages >= 4
        assert fetch(flow, others[:20], prefill_tokens_s=1e-3)[0].landed == 20
        assert fetch(flow, others[20:40], parent=others[19])[0].landed == 20


@pytest.mark.parametrize("wrong", [
    {"keys": [b"short"]}, {"keys": []}, {"nbytes": 0}, {"nbytes": 1 << 32}, {"parent": b"short"}, {"deadline_s": 0.0},
])  # fmt: skip
def test_a_wish_that_cannot_be_is_told_so(store, tier, wrong):
    keys = wrong.pop("keys", chain("a", 1))
    with flowing(store, tier) as flow:
        assert fetch(flow, keys, **wrong)[0].cause == "bad_request"
    assert tier.made("contains") == []


def test_a_word_that_raises_ends_nothing(store, tier):
    keys = chain("a", 8)
    put_into(tier, keys)

    def tell(_word: object) -> None:
        raise RuntimeError("broken ear")

    with flowing(store, tier) as flow:
        flow.ask(wish_for(keys), tell)
        assert fetch(flow, keys)[0].landed == 8


def test_who_is_told_may_ask_and_cancel(store, tier):
    keys, more, ended = chain("a", 8), chain("b", 8), threading.Event()
    put_into(tier, [*keys, *more])
    with flowing(store, tier) as flow:

        def tell(word):
            if word.done:
                flow.ask(wish_for(more), lambda next_word: next_word.done and ended.set())
                flow.ask(wish_for(more), lambda _: None).cancel()

        flow.ask(wish_for(keys), tell)
        assert ended.wait(120)


def test_the_arena_is_registered_before_anything_is_read_into_it(store, tier):
    with flowing(store, tier):
        assert tier.memory is not None and len(tier.memory) >= CAPACITY


@pytest.mark.parametrize("write", ["none", "all"])
def test_a_pool_that_grows_is_registered_anew_and_fetched_into(pool, store, space, tier, write):
    keys = chain("a", 200)
    put_into(tier, keys)
    with flowing(store, (settings(write=write), tier)) as flow:
        before = tier.memory
        with EmbeddedStore(pool, 2 * CAPACITY):
            wait_until(lambda: tier.memory is not before)
            assert len(tier.memory) >= 2 * CAPACITY
            assert fetch(flow, keys)[0].landed == 200
            assert all(is_right(space, key) for key in keys)


def test_reports_are_plain_values(store, tier):
    put_into(tier, chain("a", 8))
    with flowing(store, (settings("mine"), tier)) as flow:
        fetch(flow, chain("a", 10))
        (report,) = msgspec.to_builtins(flow.stats())
    assert report["title"] == "mine" and report["kind"] == "disk" and report["pages"] == 8
    assert report["fetched_pages"] == report["hit_pages"] == 8 and report["asked_pages"] == 10
    assert report["fetched_nbytes"] == 8 * PAGE_NBYTES and report["fetch_s"] > 0
