"""Which pages tiers have, wherever they lie: what is asked, what is told, and that nothing is fetched for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from agent.flows import PATIENT_S, flowing, put_into
from agent.memory_tier import MemoryTier
from agent.stand_in import CAPACITY, configured, running, space_of, tiered, until
from agent.test_server import PLACE, Visitor, met
from causes import forget_causes

from mooncake_connector.kv.geometry import Shard
from store_client import EmbeddedStore
from store_client.agent import server
from store_client.agent.flow import Flow
from store_client.agent.messages import MAX_SOUGHT, Found, Place, Seek
from store_client.agent.tiered import TieredStore
from store_client.base import Seen
from store_client.sharded import ShardView
from store_client.testing import PAGE_NBYTES, SHARD, chain, namespace
from store_client.tiers.base import SpaceName, TierError

SPACE = SpaceName(namespace().digest, SHARD)
KEYS = chain("a", 6)


@pytest.fixture(autouse=True)
def causes(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_causes()
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", PATIENT_S)


class Words:
    """What was told, until `done`."""

    def __init__(self) -> None:
        self.said: list[list[bool]] = []
        self.done = threading.Event()

    def __call__(self, found: Sequence[bool], done: bool) -> None:
        self.said.append(list(found))
        if done:
            assert not self.done.is_set(), "the end was told twice"
            self.done.set()


def sought(flow: Flow, keys: Sequence[bytes]) -> list[bool]:
    words = Words()
    flow.seek(SPACE, keys, PAGE_NBYTES, words)
    assert words.done.wait(PATIENT_S)
    return words.said[-1]


def test_pages_are_found_wherever_they_lie_and_in_any_tier_and_none_is_fetched(store):
    near, far = MemoryTier(), MemoryTier()
    put_into(near, KEYS[1:2])
    put_into(far, KEYS[3:5])
    with flowing(store, near, far) as flow:
        assert sought(flow, KEYS) == [False, True, False, True, True, False]
        assert near.made("contains") == far.made("contains") == [tuple(KEYS)], "one question for all of them"
        assert not near.made("read") and not far.made("read")


def test_a_tier_that_hangs_keeps_back_nothing_that_another_has(store):
    near, far = MemoryTier(), MemoryTier()
    put_into(far, KEYS[:1])
    near.deaf.add("contains")
    with flowing(store, near, far) as flow:
        words = Words()
        flow.seek(SPACE, KEYS, PAGE_NBYTES, words)
        until(lambda: words.said)
        assert words.said == [[True, *[False] * 5]] and not words.done.is_set()
        near.listen.set()
        assert words.done.wait(PATIENT_S)


def test_a_tier_that_fails_has_nothing(store):
    tier = MemoryTier()
    put_into(tier, KEYS)
    tier.failing = TierError("gone", "unavailable")
    with flowing(store, tier) as flow:
        assert sought(flow, KEYS) == [False] * 6
        tier.failing = None
        assert sought(flow, KEYS) == [False] * 6, "it is left alone for a while"


def test_what_is_found_is_known_once_the_agent_has_said_all_and_for_a_while(pool, monkeypatch):
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        assert space.seek(KEYS).pending
        (name, keys, nbytes, tell) = until(lambda: agent.fetches.sought)[0]
        assert (name, keys, nbytes) == (SPACE, KEYS, PAGE_NBYTES)
        tell([True, *[False] * 5], False)
        until(lambda: space.seek(KEYS).found[0])
        assert space.seek(KEYS).pending
        tell([True, *[False] * 4, True], True)
        until(lambda: space.seek(KEYS) == Seen([True, *[False] * 4, True]))
        assert len(agent.fetches.sought) == 1 and not agent.fetches.asked
        monkeypatch.setattr("store_client.agent.sought._GOOD_S", 0.0)
        space.seek(KEYS)
        until(lambda: len(agent.fetches.sought) == 2)


def test_the_last_keys_of_very_many_are_sought(pool):
    many = chain("b", MAX_SOUGHT + 3)
    with running(pool) as agent, tiered(pool) as store:
        space_of(store).seek(many)
        (_, keys, _, tell) = until(lambda: agent.fetches.sought)[0]
        assert keys == many[3:]
        tell([True] * MAX_SOUGHT, True)
        until(lambda: space_of(store).seek(many) == Seen([False] * 3 + [True] * MAX_SOUGHT))


def test_of_very_many_answers_the_oldest_is_asked_for_again(pool, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._MAX_SOUGHT_KEPT", 2)
    with running(pool) as agent, tiered(pool) as store:
        space, chains = space_of(store), [chain(name, 3) for name in "abc"]
        for number, keys in enumerate([*chains, *chains[1:], chains[0]]):
            space.seek(keys)
            asked = min(number + 1, 3) + (number == 5)
            until(lambda asked=asked: len(agent.fetches.sought) == asked)
        assert [keys for _, keys, *_ in agent.fetches.sought] == [*chains, chains[0]]


def test_without_an_agent_or_of_private_pages_nothing_is_sought(pool):
    with TieredStore(EmbeddedStore(pool, CAPACITY), configured(pool)) as store:
        assert space_of(store).seek(KEYS) == Seen([False] * 6, unheard=True)
    with running(pool) as agent, tiered(pool) as store:
        assert store.space(namespace(), SHARD).seek(KEYS) == Seen([False] * 6)
        assert not agent.fetches.sought


def test_an_agent_that_goes_has_found_nothing_more(pool):
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        space.seek(KEYS)
        until(lambda: agent.fetches.sought)
        agent.stop()
        until(lambda: not space.seek(KEYS).pending)


def test_pages_in_parts_are_found_where_all_parts_are(pool):
    halves = [Shard(SHARD.layer_start, SHARD.layer_stop, *heads) for heads in ((0, 1), (1, 2))]
    with running(pool) as agent, tiered(pool) as store:
        agent.fetches.elsewhere = halves
        view = ShardView(store, namespace(), SHARD, PAGE_NBYTES // SHARD.num_units)
        until(lambda: store.shards_elsewhere(namespace()))
        answers = {SHARD: [False] * 6, halves[0]: [True, True, *[False] * 4], halves[1]: [False, *[True] * 5]}

        def found() -> bool:
            seen = view.seek(KEYS)
            while agent.fetches.sought:
                name, keys, _, tell = agent.fetches.sought.pop()
                tell(answers[name.shard][6 - len(keys) :], True)
            return not seen.pending and seen.found == [False, True, *[False] * 4]

        until(found)


@pytest.mark.parametrize("junk", ["unknown place", "half a key"])
def test_a_question_that_cannot_be_ends_the_connection(pool, junk):
    with running(pool):
        visitor = met(pool)
        keys = b"x" * 40 if junk == "half a key" else KEYS[0]
        visitor.send(PLACE, Seek(1, 9 if junk == "unknown place" else 1, keys, PAGE_NBYTES))
        assert visitor.is_refused()


def test_of_too_many_at_a_time_nothing_is_found(pool, monkeypatch):
    monkeypatch.setattr(server, "MAX_SEEKS", 2)
    with running(pool) as agent:
        visitor: Visitor = met(pool)
        place: Place = PLACE
        visitor.send(place, *(Seek(number, 1, KEYS[0], PAGE_NBYTES) for number in range(3)))
        assert visitor.hear() == Found(2, b"\0", True)
        for *_, tell in agent.fetches.sought:
            tell([True], True)
        assert {visitor.hear().number for _ in range(2)} == {0, 1}
        visitor.send(Seek(3, 1, KEYS[0], PAGE_NBYTES))
        until(lambda: len(agent.fetches.sought) == 3)


def test_what_was_not_answered_is_sought_again_once_the_agent_is_back(pool):
    with running(pool) as agent, tiered(pool) as store:
        space = space_of(store)
        assert space.seek(KEYS).pending
        until(lambda: agent.fetches.sought)
        (sought,) = space._sought.values()
        sought.asked_s = sought.ended_s = sought.asked_s - PATIENT_S  # longer ago than any answer is good
        agent.stop()
        until(lambda: sought.done and not store._client.ready)
        with running(pool) as second:
            until(lambda: store._client.ready)
            assert space.seek(KEYS).pending
            until(lambda: second.fetches.sought)
