"""For how long a prompt waits for the agent's first word: as long as that costs little beside what tiers bring."""

from __future__ import annotations

import pytest
from agent.stand_in import running, tiered, until

from store_client.agent import patience
from store_client.agent.patience import LEAST_S, Patience
from store_client.agent.wish import Word
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace


def test_before_anything_is_known_the_wait_is_short():
    assert Patience().wait_s(None) == Patience().wait_s(1.0) == LEAST_S


def test_where_tiers_bring_nothing_it_stays_so_however_long_the_prompt():
    one = Patience()
    one.heard(100, 0)
    assert one.wait_s(3600.0) == LEAST_S


def test_it_is_a_part_of_what_waiting_brings_on_average():
    one = Patience()
    one.heard(100, 100)
    assert one.wait_s(0.4) == pytest.approx(0.1)
    one.heard(100, 0)
    assert 0.04 < one.wait_s(0.4) < 0.06
    assert one.wait_s(0.004) == one.wait_s(None) == LEAST_S


def test_no_word_is_waited_for_very_long():
    one = Patience()
    one.heard(100, 100)
    assert one.wait_s(3600.0) == patience._MOST_S


def test_what_was_long_ago_counts_no_more():
    one = Patience()
    one.heard(10, 10)
    for _ in range(500):
        one.heard(10, 0)
    assert one.wait_s(10.0) == LEAST_S


@pytest.mark.parametrize("word", [Word(coming=5, settled=True), Word(done=True, cause="absent")], ids=["has", "lacks"])
def test_a_store_learns_from_the_words_it_hears(pool, monkeypatch, word):
    monkeypatch.setattr(patience, "_MOST_S", 3600.0)
    monkeypatch.setattr(patience, "LEAST_S", 0.0)
    with running(pool) as agent, tiered(pool) as store:
        space = store.space(namespace(), SHARD, PAGE_NBYTES)
        keys, others = chain("a", 5), chain("b", 5)
        space.prefetch(keys, prefill_tokens_s=0.1)
        until(lambda: agent.fetches.asked)[0].tell(word)
        until(lambda: store._client.patience._asked)
        space.prefetch(others, prefill_tokens_s=0.1)
        found = space.lookup(others)
        assert found.pending == (word.coming > 0)
        if found.pending:
            assert 0 < found.wait_s <= 0.25 * 5 * 64 / 0.1
