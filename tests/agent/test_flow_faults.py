"""A tier that hangs, fails or lies costs nobody else: what it was to bring is a miss, or comes from another one."""

from __future__ import annotations

import threading

import pytest
from agent.flows import PATIENT_S, SECRET, ask, fetch, flowing, is_right, put_into, settings, wait_until
from agent.memory_tier import MemoryTier
from store.audit import audit

from store_client.agent import source
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace
from store_client.tiers.base import TierError, TierStats


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


def test_what_tiers_have_is_asked_of_those_that_can_be_used_and_of_what_all_may_read(store):
    keys, private = chain("a", 3), namespace(f"private-{'0' * 32}")
    working, broken, short = MemoryTier(), MemoryTier(), MemoryTier()
    put_into(working, keys[:2])
    broken.failing = TierError("it is gone", "unavailable", lasting=True)
    short.contains = lambda *asked, **limits: [True]

    def has(flow, name):
        found = flow.holds(name, SHARD, keys, PAGE_NBYTES, PATIENT_S)
        return [answer.result(PATIENT_S) for _, answer in found]

    with flowing(store, working, broken, short) as flow:
        assert has(flow, namespace()) == [[True, True, False], None, None]
        assert has(flow, namespace()) == [[True, True, False], None], "what failed for good is asked no more"
        assert private.is_private and has(flow, private) == []


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


def test_a_page_whose_seal_does_not_fit_is_read_once_before_it_is_removed(store, tier):
    """Scheduler and workers of an engine ask one after the other; who computes it again writes it back."""
    keys, seconds = chain("a", 4), []
    put_into(tier, keys)
    tier.corrupt = True

    def ask_again() -> None:
        _, second = ask(flow, keys)
        second.wait(lambda word: word.coming or word.done)
        seconds.append(second)

    tier.before["remove"] = ask_again
    with flowing(store, tier) as flow:
        assert fetch(flow, keys)[0].cause == "corrupt"
        wait_until(lambda: seconds)
        assert seconds[0].end().cause == "corrupt"
        assert tier.made("read") == [tuple(keys)] and flow.stats()[0].corrupt_pages == 4


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
