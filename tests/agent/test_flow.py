"""What is asked for comes from the nearest tier that has it, right and once, or is said not to come."""

from __future__ import annotations

import os
import threading

import msgspec
import pytest
from agent.flows import PATIENT_S, SECRET, ask, fetch, flowing, is_right, put_into, settings, wait_until, wish_for
from agent.memory_tier import MemoryTier
from lock_holder import stopped_holder
from store.audit import audit
from store.pools import CAPACITY, space_in

from store_client import EmbeddedStore
from store_client.agent import source
from store_client.embedded import EmbeddedSpace
from store_client.embedded.locks import FileLock
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace, put_chain
from store_client.tiers.base import TierError, TierStats


@pytest.fixture
def space(store: EmbeddedStore) -> EmbeddedSpace:
    return store.space(namespace(), SHARD)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


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


def test_a_tier_that_hangs_does_not_keep_another_from_answering(store, space):
    hanging, other = MemoryTier(), MemoryTier()
    hanging.deaf = {"contains"}
    keys = chain("a", 40)
    put_into(other, keys[:30])
    with flowing(store, hanging, other) as flow:
        _, heard = ask(flow, keys)
        heard.wait(lambda word: word.landed == 30)
        assert not heard.words[-1].done, "the other one may have more"
        hanging.listen.set()
        assert heard.end().landed == 30


def test_a_chain_that_another_tier_has_all_of_ends_without_the_one_that_hangs(store):
    hanging, other = MemoryTier(), MemoryTier()
    hanging.deaf = {"contains"}
    put_into(other, chain("a", 40))
    with flowing(store, hanging, other) as flow:
        assert fetch(flow, chain("a", 40))[0].landed == 40
        wait_until(lambda: hanging.made("contains"))


def test_what_a_tier_that_hangs_was_to_bring_comes_from_another_one(store, space):
    hanging, other = MemoryTier(parallel=1), MemoryTier()
    keys = chain("a", 8)
    put_into(hanging, keys)
    put_into(other, keys)
    hanging.deaf = {"read"}
    other.before["contains"] = lambda: wait_until(lambda: hanging.made("read"))
    with flowing(store, (settings("near", timeout_s=0.05), hanging), (settings("far"), other)) as flow:
        assert fetch(flow, keys)[0].landed == 8
        assert all(is_right(space, key) for key in keys)
        near, _ = flow.stats()
        assert near.errors["hanging"] == 1 and near.reads == "open"
        asked = len(hanging.made("contains"))
        put_into(other, chain("b", 4))
        assert fetch(flow, chain("b", 4))[0].landed == 4
        assert len(hanging.made("contains")) == asked, "it is left alone"
        hanging.listen.set()
    audit(store)


def test_a_tier_that_does_not_list_answers_questions_all_the_same(store, tier):
    keys = chain("a", 4)
    put_into(tier, keys)
    tier.deaf = {"shards"}
    with flowing(store, tier) as flow:
        for number in range(4):
            flow.shards(namespace(f"model {number}"), lambda shards, done: None)
        wait_until(lambda: tier.made("shards"))
        assert fetch(flow, keys)[0].landed == 4
        assert len(tier.made("shards")) == 1


def test_a_tier_that_may_not_be_listed_is_read_from_all_the_same(store, tier):
    keys, told = chain("a", 4), []

    def deny() -> None:
        raise TierError("not allowed to list", "denied", lasting=True)

    put_into(tier, keys)
    tier.before["shards"] = deny
    with flowing(store, tier) as flow:
        for number in range(4):
            flow.shards(namespace(f"model {number}"), lambda shards, done: told.append((list(shards), done)))
        wait_until(lambda: told.count(([], True)) == 4)
        assert fetch(flow, keys)[0].landed == 4
        (report,) = flow.stats()
        assert (report.reads, report.writes, report.errors) == ("closed", "none", {"denied": 1})
        assert len(tier.made("shards")) == 1, "it is left alone with that"


def test_close_does_not_wait_for_a_tier_that_hangs(store, tier):
    put_into(tier, chain("a", 4))
    tier.deaf = {"read"}
    with flowing(store, tier) as flow:
        _, heard = ask(flow, chain("a", 4))
        wait_until(lambda: tier.made("read"))
        flow.close()
        assert heard.end().cause == "closed"
        assert not tier.is_closed, "a call of it is under way"
        assert fetch(flow, chain("a", 4))[0].cause == "closed"


def test_close_closes_the_tiers(store, tier):
    with flowing(store, tier) as flow:
        fetch(flow, chain("a", 4))
        flow.close()
        flow.close()
    assert tier.is_closed


def test_a_tier_that_fails_is_a_miss_and_left_alone(store, space):
    failing, other = MemoryTier(), MemoryTier()
    keys = chain("a", 8)
    put_into(other, keys)
    failing.failing = TierError("nobody is there", "unavailable")
    with flowing(store, failing, other) as flow:
        assert fetch(flow, keys)[0].landed == 8
        wait_until(lambda: flow.stats()[0].errors.get("unavailable"))
        report = flow.stats()[0]
        assert report.reads == "open" and report.cause == "unavailable"


def test_where_every_tier_is_left_alone_the_cause_is_theirs(store, tier):
    tier.failing = TierError("nobody is there", "denied", lasting=True)
    with flowing(store, tier) as flow:
        assert fetch(flow, chain("a", 8))[0].cause == "denied"
        assert fetch(flow, chain("a", 8))[0].cause == "denied"
        assert len(tier.made("contains")) == 1
        assert flow.stats()[0].retry_s > 100


def test_what_a_tier_said_it_has_and_does_not_deliver_is_a_miss(store, tier):
    keys = chain("a", 8)
    put_into(tier, [*keys[:5], *keys[6:]])
    tier.lying = True
    with flowing(store, tier) as flow:
        word, _ = fetch(flow, keys)
        assert (word.landed, word.cause) == (5, "undelivered")
        assert flow.stats()[0].undelivered_pages == 1
    audit(store)


@pytest.mark.parametrize("wrong", ["bytes", "another page", "no seal", "size"])
def test_a_page_whose_seal_does_not_fit_is_a_miss_and_removed_from_the_tier(store, space, tier, wrong, caplog):
    keys = chain("a", 8)
    put_into(tier, keys)
    name = next(name for name in tier.pages if name[1] == keys[3])
    page, seal = tier.pages[name]
    other = next(name for name in tier.pages if name[1] == keys[4])
    if wrong == "bytes":
        page[7] ^= 1
    else:
        tier.pages[name] = {
            "another page": tier.pages[other], "no seal": (page, b""), "size": (page, seal[:8] + bytes(8) + seal[16:]),
        }[wrong]  # fmt: skip
    with flowing(store, tier) as flow:
        word, _ = fetch(flow, keys)
        assert (word.landed, word.cause) == (3, "corrupt")
        wait_until(lambda: tier.made("remove") == [(keys[3],)])
        assert flow.stats()[0].corrupt_pages == 1
    assert not space.contains(keys[3:4])[0]
    assert sum("is not that page" in record.message for record in caplog.records) == 1


def test_pages_behind_one_that_failed_come_from_where_it_does(store, space):
    broken, other = MemoryTier(), MemoryTier()
    keys = chain("a", 16)
    put_into(broken, keys)
    broken.corrupt = True
    put_into(other, keys)
    with flowing(store, broken, other) as flow:
        assert fetch(flow, keys)[0].landed == 16
    assert all(is_right(space, key) for key in keys)
    audit(store)


def test_where_others_may_write_a_page_needs_the_secret(store, space):
    tier = MemoryTier(needs_mac=True)
    keys = chain("a", 4)
    put_into(tier, keys[:2], secret=SECRET)
    put_into(tier, keys[2:3])
    put_into(tier, keys[3:], secret=b"another secret of somebody else..")
    with flowing(store, tier, secret=SECRET) as flow:
        assert fetch(flow, keys)[0].landed == 2
        assert flow.stats()[0].corrupt_pages == 2


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


def test_clear_says_where_a_tier_could_not_do_it_and_asks_all(store):
    failing, other = MemoryTier(), MemoryTier()
    put_into(other, chain("a", 4))
    failing.failing = TierError("nobody is there", "unavailable")
    done: set[str] = set()
    with flowing(store, failing, other) as flow:
        with pytest.raises(TierError, match="tier-0: nobody is there"):
            flow.clear(None, done)
        assert other.stored() == [] and done == {"tier-1"}
        failing.failing = None
        put_into(other, chain("b", 2))
        assert flow.clear(None, done) == 0
        assert other.stored() == chain("b", 2) and done == {"tier-0", "tier-1"}


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
    with EmbeddedStore(pool, 32 * PAGE_NBYTES) as store, flowing(store, tier) as flow:
        word, _ = fetch(flow, keys)
        assert word.done and word.landed > 0
        audit(store)


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


def test_a_tier_that_cannot_be_closed_keeps_no_other_from_it(store, tier, monkeypatch):
    broken = MemoryTier()
    monkeypatch.setattr(broken, "close", lambda: 1 / 0)
    with flowing(store, broken, tier):
        pass
    assert tier.is_closed


def test_a_tier_that_does_not_say_its_figures_is_asked_by_one_thread_and_the_last_ones_are_told(
    store, tier, monkeypatch
):
    put_into(tier, chain("a", 3))
    with flowing(store, tier) as flow:
        assert flow.stats()[0].pages == 3
        answer, asked = threading.Event(), []
        monkeypatch.setattr(source, "_FIGURES_S", 0.05)
        monkeypatch.setattr(tier, "stats", lambda: (asked.append(1), answer.wait(PATIENT_S), TierStats(pages=5))[-1])
        assert [flow.stats()[0].pages for _ in range(5)] == [3] * 5
        assert len(asked) == 1
        answer.set()
        wait_until(lambda: flow.stats()[0].pages == 5)
