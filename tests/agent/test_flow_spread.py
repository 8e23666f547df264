"""Tiers are given the pages of the pool that their settings name, and nothing of it delays anybody."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from agent.flows import PATIENT_S, SECRET, fetch, flowing, is_right, put_into, settings, wait_until
from agent.memory_tier import MemoryTier
from store.pools import CAPACITY

from mooncake_connector.kv.namespace import private_model_digest
from store_client import EmbeddedStore, Put
from store_client.agent import gift, late, spread
from store_client.agent.late import Late, LateWrites
from store_client.agent.later import LaterTier
from store_client.testing import PAGE_NBYTES, SHARD, chain, get_page, namespace, put_chain
from store_client.tiers.base import SpaceName, Tier, TierError


@pytest.fixture
def tier() -> MemoryTier:
    """Given one batch at a time, so that the last one to arrive says that all did."""
    return MemoryTier(parallel=1)


def giving(tier: MemoryTier, name: str = "memory", **fields: object):
    return settings(name, **{"write": "all", **fields}), tier


def has(tier: MemoryTier, keys: list[bytes]) -> bool:
    return set(keys) <= set(tier.stored())


def settle(store: EmbeddedStore, *tiers: MemoryTier) -> None:
    """Until all that was stored before was looked at: a page that is stored now, without parents, is the last one."""
    (mark,) = chain(f"mark {store.stats().stored_pages}", 1)
    put_chain(store.space(namespace(), SHARD), [mark])
    for tier in tiers:
        wait_until(lambda tier=tier: mark in tier.stored())


def test_new_pages_reach_the_tier_parents_first_and_another_pool(store, space, tier, tmp_path):
    keys = chain("a", 40)
    with flowing(store, giving(tier)):
        assert put_chain(space, keys) == [Put.STORED] * 40
        wait_until(lambda: has(tier, keys))
    assert tier.stored() == keys
    tier.is_closed = False
    with EmbeddedStore(tmp_path / "other", CAPACITY) as other, flowing(other, (settings(), tier)) as flow:
        assert fetch(flow, keys)[0].landed == 40
        assert all(is_right(other.space(namespace(), SHARD), key) for key in keys)


def test_as_many_batches_are_under_way_as_suit_the_tier(store, space):
    tier, both, under_way, turns = MemoryTier(parallel=2), threading.Event(), [], count()

    def call() -> None:
        under_way.append(1)
        if len(under_way) == 2:
            both.set()
        both.wait(PATIENT_S)
        under_way.pop()

    tier.before["write"] = call
    with flowing(store, giving(tier)):
        # What is stored just when the flow begins may be offered to one thread alone.
        wait_until(lambda: both.is_set() or not put_chain(space, chain(f"turn {next(turns)}", 8)))


def test_a_tier_that_opens_late_is_given_as_many_batches_at_once_as_suit_it(store, space):
    tier, opens, all_four, under_way, turns = MemoryTier(parallel=4), threading.Event(), threading.Event(), [], count()

    def call() -> None:
        under_way.append(1)
        if len(under_way) == 4:
            all_four.set()
        all_four.wait(PATIENT_S)
        under_way.pop()

    def open_it() -> Tier:
        assert opens.wait(PATIENT_S)
        return tier

    tier.before["write"] = call
    late = LaterTier("late", open_it)
    assert late.parallel < 4 and "is being opened" in late.stats().notes["not open"]
    with flowing(store, (settings("late", write="all"), late)):
        opens.set()
        wait_until(lambda: late.parallel == 4)
        assert late.stats() == tier.stats()
        wait_until(lambda: all_four.is_set() or not put_chain(space, chain(f"turn {next(turns)}", 8)))


def test_a_call_that_does_not_come_back_holds_up_no_other(store, space):
    """What is stored just when the flow begins may be given twice at once, so two threads of three may hang."""
    first, second, held = chain("first", 4), chain("second", 12), threading.Event()

    class Holding(MemoryTier):
        def write(self, space, pages, **named):
            if {page.key for page in pages} & set(first):
                held.set()
                self.listen.wait(PATIENT_S)
            return super().write(space, pages, **named)

    tier = Holding(parallel=3)
    with flowing(store, giving(tier)):
        put_chain(space, first)
        assert held.wait(PATIENT_S)
        put_chain(space, second)
        wait_until(lambda: has(tier, second))
        assert not set(first) & set(tier.stored())
        tier.listen.set()
        wait_until(lambda: has(tier, first))


def test_a_new_tier_is_offered_what_the_pool_has(store, space, tier):
    keys, more = chain("a", 20), chain("b", 4)
    put_chain(space, keys)
    put_into(tier, keys[:5])
    with flowing(store, giving(tier)) as flow:
        wait_until(lambda: has(tier, keys))
        put_chain(space, more)
        wait_until(lambda: has(tier, more))
        wait_until(lambda: flow.stats()[0].present_pages == 5)
    assert sorted(key for write in tier.made("write") for key in write) == sorted([*keys[5:], *more])


def test_a_tier_that_is_given_nothing_gets_nothing(store, space):
    given, other = MemoryTier(parallel=1), MemoryTier(parallel=1)
    with flowing(store, giving(given, "given"), (settings("other", write="none"), other)) as flow:
        put_chain(space, chain("a", 4))
        settle(store, given)
        assert flow.stats()[1].writes == "none"
    assert other.made("write") == []


def test_pages_that_are_read_again_reach_a_tier_that_wants_those(store, space, tier, monkeypatch):
    monkeypatch.setattr(spread, "_REREAD_POLL_S", 0.05)
    keys = chain("a", 8)
    put_chain(space, keys)
    assert get_page(space, keys[0]) is not None
    with flowing(store, giving(tier, write="reused")):
        wait_until(lambda: has(tier, keys[:1]))
        put_chain(space, chain("b", 2))
        assert get_page(space, keys[4]) is not None and get_page(space, keys[3]) is not None
        wait_until(lambda: has(tier, keys[3:5]))
        assert get_page(space, keys[3]) is not None
        assert get_page(space, keys[5]) is not None
        wait_until(lambda: has(tier, keys[5:6]))
    given = [key for write in tier.made("write") for key in write]
    assert sorted(given) == sorted([keys[0], *keys[3:6]]), "each once"


@pytest.mark.parametrize("share", [False, True])
def test_what_came_from_a_tier_is_given_to_others_where_they_share(store, space, share):
    source, sink = MemoryTier(parallel=1), MemoryTier(parallel=1)
    keys = chain("a", 8)
    put_into(source, keys)
    with flowing(store, (settings("source"), source), giving(sink, "sink", share=share)) as flow:
        settle(store, sink)
        assert fetch(flow, keys)[0].landed == 8
        settle(store, sink)
        assert has(sink, keys) == share
        assert not share or [key for key in sink.stored() if key in keys] == keys


def test_nothing_is_lost_while_a_tier_is_not_there(store, space, tier):
    tier.failing = TierError("nobody is there", "unavailable")
    keys = chain("a", 30)
    with flowing(store, giving(tier)) as flow:
        put_chain(space, keys[:10])
        wait_until(lambda: flow.stats()[0].writes == "open")
        put_chain(space, keys)
        tier.failing = None
        wait_until(lambda: has(tier, keys))
        assert flow.stats()[0].overtaken_pages == 0
        assert flow.stats()[0].errors["unavailable"] >= 1


def test_a_tier_that_fell_behind_the_feed_is_offered_what_the_pool_has(store, space, tier):
    flood = store.space(namespace("flood"), SHARD)
    with flowing(store, giving(tier)) as flow:
        settle(store, tier)
        before = store.changes().position
        tier.failing = TierError("nobody is there", "unavailable")
        put_chain(space, chain("a", 4))
        wait_until(lambda: flow.stats()[0].writes == "open")
        turn, keys = 0, []
        while not store.changes(before).gap:
            turn, keys = turn + 1, chain(f"flood {turn}", 1000)
            put_chain(flood, keys, 4096)
        tier.failing = None
        present = [key for key, there in zip(keys, flood.contains(keys), strict=True) if there]
        assert len(present) > 500
        wait_until(lambda: has(tier, present))


def test_pages_that_are_gone_before_they_are_given_are_overtaken(store, space, tier):
    keys = chain("a", 8)
    with flowing(store, giving(tier)) as flow:
        settle(store, tier)
        tier.failing = TierError("nobody is there", "unavailable")
        put_chain(space, keys)
        wait_until(lambda: flow.stats()[0].writes == "open")
        space.remove(keys[4:])
        tier.failing = None
        wait_until(lambda: flow.stats()[0].overtaken_pages == 4)
        wait_until(lambda: has(tier, keys[:4]))
    assert not set(keys[4:]) & set(tier.stored())


def test_a_page_that_changes_while_the_tier_reads_it_is_removed_again(store, space, tier):
    keys = chain("a", 4)
    with flowing(store, giving(tier)) as flow:
        settle(store, tier)
        tier.before["write"] = lambda: space.remove(keys[2:3]) if space.contains(keys[2:3])[0] else None
        put_chain(space, keys)
        wait_until(lambda: (keys[2],) in tier.made("remove"))
        settle(store, tier)
        assert flow.stats()[0].overtaken_pages == 1
    assert has(tier, [*keys[:2], *keys[3:]]) and keys[2] not in tier.stored()


@pytest.mark.parametrize("count", [1, 4])
def test_a_page_that_is_cleared_while_a_call_hangs_is_removed_again(store, space, tier, count, monkeypatch):
    """The tier has forgotten the namespace by then, and stores the page all the same."""
    monkeypatch.setattr("store_client.agent.breaker.FIRST_PAUSE_S", 0.01)
    keys, later = chain("a", count), chain("later", 1)
    with flowing(store, giving(tier, timeout_s=0.05)) as flow:
        tier.deaf = {"write"}
        put_chain(space, keys)
        wait_until(lambda: flow.stats()[0].errors.get("hanging"))
        space.clear()
        tier.listen.set()
        put_chain(space, later)
        wait_until(lambda: has(tier, later))
        assert any(set(keys) & set(removed) for removed in tier.made("remove"))
    assert tier.stored() == later


def test_a_page_that_is_cleared_while_a_write_fails_is_removed_again(store, space, tier, monkeypatch):
    """A write that timed out may have been done; nor is it forgotten where the tier is left alone for a while."""
    monkeypatch.setattr("store_client.agent.breaker.FIRST_PAUSE_S", 0.01)
    keys = chain("a", 1)

    def lose() -> None:
        if tier.made("write")[-1] == tuple(keys) and space.contains(keys)[0]:
            put_into(tier, keys)
            space.clear()
            tier.failing = TierError("the answer was lost", "unavailable")

    def come_back() -> None:
        if len(tier.made("remove")) == 2:
            tier.failing = None

    tier.before |= {"write": lose, "remove": come_back}
    with flowing(store, giving(tier)):
        put_chain(space, keys)
        wait_until(lambda: len(tier.made("remove")) == 2 and not tier.stored())


@pytest.mark.parametrize("cleared", [True, False])
def test_a_page_that_a_tier_stores_after_it_was_cleared_and_removed_is_removed_again(
    store, space, tier, cleared, monkeypatch
):
    """A request that a store finishes long after it was given up. What was not cleared, or was stored again, stays."""
    monkeypatch.setattr("store_client.agent.breaker.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("store_client.agent.late.SETTLED_S", 0.0)
    keys, due, remove = chain("a", 2), LateWrites.due, tier.remove
    seen, removed, settled = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(LateWrites, "due", lambda self, now_s: due(self, now_s) if settled.is_set() else None)

    def lose() -> None:
        if set(keys) <= set(tier.made("write")[-1]) and not seen.is_set():  # with the mark, perhaps
            seen.set()
            (space.clear if cleared else partial(space.remove, keys))()
            raise TierError("no answer", "timeout")

    def say_once_removed(space, taken, **named) -> int:
        count = remove(space, taken, **named)
        if set(keys) <= set(taken):
            removed.set()
        return count

    monkeypatch.setattr(tier, "remove", say_once_removed)
    tier.before["write"] = lose
    with flowing(store, giving(tier)) as flow:
        settle(store, tier)
        put_chain(space, keys)
        assert removed.wait(PATIENT_S)
        put_into(tier, keys)
        if cleared:
            put_chain(space, keys[:1])
        settled.set()
        wait_until(lambda: not flow._sources[0].late_writes._waiting)
        settle(store, tier)
        assert [has(tier, [key]) for key in keys] == [True, not cleared]


def test_what_cannot_be_removed_yet_is_removed_later_and_not_for_ever(monkeypatch):
    writes, name = LateWrites(), SpaceName(namespace().digest, SHARD)
    given = Late(name, chain("a", 1), 3)
    writes.note(given, 0.0)
    writes.note(given._replace(keys=[]), 0.0)
    now_s = late.SETTLED_S
    assert writes.due(now_s - 1.0) is None
    for turn in range(1, late.TRIES + 1):
        due = writes.due(now_s)
        assert due is not None and (due.keys, due.clears, due.tries) == (given.keys, 3, turn)
        assert writes.due(now_s) is None
        writes.note(due, now_s)
        now_s += late.SETTLED_S
    assert writes.due(now_s) is None


def test_a_batch_that_the_tier_cannot_take_does_not_hold_up_the_next(store, space, tier):
    bad, good = chain("bad", 1), chain("good", 4)

    def refuse() -> None:
        tier.failing = TierError("strange", "error") if tier.made("write")[-1] == tuple(bad) else None

    tier.before["write"] = refuse
    tier.before["contains"] = lambda: setattr(tier, "failing", None)
    with flowing(store, giving(tier)) as flow:
        put_chain(space, bad)
        wait_until(lambda: flow.stats()[0].errors.get("error") == 3)
        tier.before["write"] = lambda: setattr(tier, "failing", None)
        put_chain(space, good)
        wait_until(lambda: has(tier, good))


def test_a_tier_that_hangs_holds_up_neither_puts_nor_another_tier(store, space):
    hanging, other = MemoryTier(parallel=1), MemoryTier(parallel=1)
    hanging.deaf = {"contains", "write"}
    keys = chain("a", 20)
    with flowing(store, giving(hanging, "hanging", timeout_s=0.05), giving(other, "other")) as flow:
        put_chain(space, keys)
        wait_until(lambda: has(other, keys))
        wait_until(lambda: flow.stats()[0].errors.get("hanging"))
        assert hanging.stored() == []
        hanging.listen.set()
        wait_until(lambda: has(hanging, keys))


def test_where_others_may_write_a_page_carries_a_mac(store, space, tmp_path):
    tier = MemoryTier(needs_mac=True, parallel=1)
    keys = chain("a", 4)
    with flowing(store, giving(tier), secret=SECRET):
        put_chain(space, keys)
        wait_until(lambda: has(tier, keys))
    assert all(any(seal[32:]) for _, seal in tier.pages.values())
    tier.is_closed = False
    with (
        EmbeddedStore(tmp_path / "other", CAPACITY) as other,
        flowing(other, (settings(), tier), secret=SECRET) as flow,
    ):
        assert fetch(flow, keys)[0].landed == 4


def test_what_was_fetched_is_counted_and_what_was_given(store, space, tier):
    keys = chain("a", 8)
    with flowing(store, giving(tier)) as flow:
        put_chain(space, keys)
        wait_until(lambda: has(tier, keys))
        wait_until(lambda: flow.stats()[0].written_pages == 8)
        report = flow.stats()[0]
    assert report.written_nbytes == 8 * PAGE_NBYTES and report.write_s > 0 and report.writes == "closed"


@pytest.mark.parametrize("write", ["all", "none", "reused"])
def test_tiers_are_tidied_now_and_then(store, tier, monkeypatch, write):
    monkeypatch.setattr(spread, "_TIDY_PERIOD_S", 0.01)
    monkeypatch.setattr(spread, "_REREAD_POLL_S", 0.05)
    with flowing(store, giving(tier, write=write)):
        wait_until(lambda: len(tier.made("tidy")) >= 2)


def test_pages_that_only_one_instance_can_read_are_given_to_no_tier(store, space, tier, monkeypatch):
    monkeypatch.setattr(spread, "_REREAD_POLL_S", 0.05)
    private = store.space(replace(namespace(), model_digest=private_model_digest()), SHARD)
    other, old, new = MemoryTier(parallel=1), chain("old", 4), chain("new", 4)
    put_chain(private, old)
    with flowing(store, giving(tier), giving(other, "other", write="reused")):
        put_chain(private, new)
        assert all(get_page(private, key) is not None for key in old + new)
        put_chain(space, mark := chain("mark", 1))
        wait_until(lambda: has(tier, mark))
        assert get_page(space, mark[0]) is not None
        wait_until(lambda: has(other, mark))
    for each in (tier, other):
        assert each.stored() == mark
        assert not set(old + new) & {key for name in ("contains", "write") for keys in each.made(name) for key in keys}


def test_a_batch_that_takes_too_long_is_made_smaller_until_it_does_not_and_grows_again(store, space, monkeypatch):
    monkeypatch.setattr(gift, "_CALM_BATCHES", 2)
    tier, slow, later = MemoryTier(batch_nbytes=8 * PAGE_NBYTES, parallel=1), chain("slow", 16), chain("later", 64)
    all_put = threading.Event()  # not a page at a time as they come

    def take_long() -> None:
        assert all_put.wait(PATIENT_S)
        too_many = len(tier.made("write")[-1]) > 2
        tier.failing = TierError("a slow uplink", "timeout") if too_many else None

    tier.before["write"] = take_long
    tier.before["contains"] = lambda: setattr(tier, "failing", None)
    with flowing(store, giving(tier)):
        put_chain(space, slow)
        all_put.set()
        wait_until(lambda: has(tier, slow))
        assert tier.stored() == slow and max(map(len, tier.made("write"))) > 2
        all_put.clear()
        tier.before["write"] = lambda: (all_put.wait(PATIENT_S), setattr(tier, "failing", None))
        put_chain(space, later)
        all_put.set()
        wait_until(lambda: has(tier, later))
        assert max(map(len, tier.made("write")[-4:])) > 2


def test_a_page_that_always_takes_too_long_does_not_hold_up_the_next(store, space, tier, monkeypatch):
    monkeypatch.setattr("store_client.agent.breaker.FIRST_PAUSE_S", 0.01)
    bad, good = chain("bad", 1), chain("good", 4)

    def take_long() -> None:
        tier.failing = TierError("too long", "timeout") if bad[0] in tier.made("write")[-1] else None

    tier.before["write"] = take_long
    tier.before["contains"] = lambda: setattr(tier, "failing", None)
    with flowing(store, giving(tier)):
        put_chain(space, bad)
        put_chain(space, good)
        wait_until(lambda: has(tier, good))
    assert bad[0] not in tier.stored()
