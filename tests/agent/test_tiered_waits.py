"""A lookup of a pool with tiers behind it waits for nobody; its answer is pending until the agent has spoken."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from agent.stand_in import UNHEARD, running, settled, space_of, tiered, until

from mooncake_connector.kv.geometry import Shard
from store_client import Lookup
from store_client.agent.asked import Asked
from store_client.agent.client import Client
from store_client.agent.messages import Frames
from store_client.agent.places import Places
from store_client.agent.wish import Word
from store_client.sharded import ShardView
from store_client.testing import DEADLINE_S, PAGE_NBYTES, SHARD, chain, namespace, put_chain


@pytest.fixture
def agent(pool):
    with running(pool) as agent:
        yield agent


@pytest.fixture
def store(pool, agent):
    with tiered(pool) as store:
        yield store


@pytest.fixture
def space(store):
    return space_of(store)


@pytest.fixture
def inner(store):
    """The pool's own part of the space."""
    return store._inner.space(namespace(), SHARD)


def promised(agent, space, keys, here=0):
    """What the agent was asked for, all of the prompt but what is here, when it has said that it is coming."""
    coming = len(keys) - here
    space.lookup(keys)
    asked = until(lambda: agent.fetches.asked)[0]
    asked.tell(Word(coming=coming, settled=True))
    settled(space, keys, Lookup(here, coming=coming))
    return asked


def looks_into_the_pool(space, monkeypatch):
    """How many pages each look is for; to find that nothing has changed there is none."""
    looks: list[int] = []
    look = space._pages.leading_since

    def noted(keys, since):
        position, present = look(keys, since)
        looks.extend([len(keys)] if present is not None else ())
        return position, present

    monkeypatch.setattr(space._pages, "leading_since", noted)
    return looks


def test_a_lookup_waits_for_nothing_while_another_thread_speaks(agent, store, space):
    """It speaks for as long as the test wants, and lookups go on; too much is dropped, the rest is said afterwards."""
    mouth = store._client._mouth
    with mouth.turn:
        for number in range(1000):
            assert space.lookup(chain(f"{number}", 3)).pages == 0
        assert store.stats().failures["agent_busy"] > 500
        assert agent.fetches.asked == []
    until(lambda: len(agent.fetches.asked) == 1000 - store.stats().failures["agent_busy"])


def test_who_has_nothing_else_to_do_waits_for_the_word(agent, store, space, monkeypatch):
    monkeypatch.setattr("store_client.agent.ears._WAIT_MS", int(1000 * DEADLINE_S))
    began_s = time.monotonic()
    store.await_word()  # nothing was asked
    keys = chain("a", 3)
    assert space.lookup(keys).pending

    def tell() -> None:
        until(lambda: agent.fetches.asked)[0].tell(Word(coming=2, settled=True))

    teller = threading.Thread(target=tell)
    teller.start()
    store.await_word()
    teller.join()
    assert space.lookup(keys) == Lookup(0, coming=2)
    assert time.monotonic() - began_s < DEADLINE_S, "it waited for more than a word"


def test_a_lookup_waits_for_nothing_while_the_agent_does_not_read(agent, store, space, monkeypatch):
    """What it has no room for is said once it reads again, in whole frames."""
    keys = [chain(f"{number}", 200) for number in range(200)]
    reads = threading.Event()
    monkeypatch.setattr("store_client.agent.mouth._SEND_S", DEADLINE_S)
    feed = Frames.feed
    monkeypatch.setattr(Frames, "feed", lambda self, data: reads.wait(DEADLINE_S) and feed(self, data))
    for each in keys:
        space.prefetch(each)
    assert store._client._outbox.qsize() and agent.fetches.asked == []
    reads.set()
    until(lambda: len(agent.fetches.asked) == len(keys))
    assert sorted(list(asked.wish.keys) for asked in agent.fetches.asked) == sorted(keys)
    assert not store.stats().failures


def test_who_asks_sends_it_himself_and_a_long_chain_is_left_to_a_thread(pool, monkeypatch):
    senders: list[tuple[int, bool]] = []
    words = Client._words

    def noted(self: Client, item: Any) -> bytes:
        if isinstance(item, Asked):
            senders.append((len(item.keys), threading.current_thread() is threading.main_thread()))
        return words(self, item)

    monkeypatch.setattr(Client, "_words", noted)
    with running(pool) as agent, tiered(pool) as store:
        until(lambda: store._client._outbox.empty())
        for length in (3, 1000):
            space_of(store).prefetch(chain(f"{length}", length))
            until(lambda length=length: any(len(asked.wish.keys) == length for asked in agent.fetches.asked))
    assert senders == [(3, True), (1000, False)]


def test_which_shards_tiers_have_is_asked_once_and_keeps_no_room_from_others(agent, store, monkeypatch):
    monkeypatch.setattr("store_client.agent.client._MAX_WAITING", 4)
    names = [namespace(f"model {number}") for number in range(10)]
    reached, stuck = [], []
    which, client = Places.which, store._client

    def hold(*args: Any) -> bytes:
        reached.append(True)
        until(lambda: stuck)
        return which(*args)

    monkeypatch.setattr(Places, "which", hold)
    agent.fetches.elsewhere = [SHARD]
    store.shards_elsewhere(namespace())
    until(lambda: reached)  # the thread that sends stands still
    for _ in range(100):
        for name in names:
            store.shards_elsewhere(name)
    assert client._outbox.qsize() == len(names)
    space_of(store).lookup(chain("a", 3))
    assert store.stats().failures.get("agent_busy", 0) == 0
    stuck.append(True)
    until(lambda: all(store.shards_elsewhere(name) == [SHARD] for name in names))
    until(lambda: agent.fetches.asked)
    until(lambda: not any(known.queued for known in client._places._elsewhere.values()))


def test_a_stopped_agent_is_not_waited_for(space, monkeypatch):
    """One that says nothing for long: its lookups are not pending, not even in their first moment."""
    monkeypatch.setattr("store_client.agent.client.Client.is_silent", lambda self, now_s: True)
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 3600.0)
    assert space.lookup(chain("a", 3)) == UNHEARD
    monkeypatch.undo()
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 3600.0)
    assert space.lookup(chain("b", 3)).pending


def test_who_waits_in_a_thread_of_its_own_has_pending_answers_until_the_first_word(agent, space, monkeypatch):
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 0.0)
    monkeypatch.setattr("store_client.agent.client._SILENT_S", 3600.0)
    keys = chain("a", 3)
    space.prefetch(chain("b", 3))
    assert space.lookup(chain("b", 3)) == UNHEARD
    space.prefetch(keys, patient=True)
    until(lambda: len(agent.fetches.asked) == 2)
    assert space.lookup(keys) == Lookup(0, pending=True)
    agent.fetches.asked[1].tell(Word(coming=2, settled=True))
    settled(space, keys, Lookup(0, coming=2))


def test_an_agent_is_silent_that_says_nothing_of_what_was_asked(store):
    client = store._client
    now_s = time.monotonic()
    assert not client.is_silent(now_s + 1000)
    client._awaits_s = now_s
    assert client.is_silent(now_s + 1000) and not client.is_silent(now_s)


def test_an_agent_that_was_not_asked_is_not_silent(agent, store, space, monkeypatch):
    client = store._client
    until(lambda: client._outbox.empty())
    with monkeypatch.context() as full, client._mouth.turn:
        full.setattr("store_client.agent.client._MAX_WAITING", 0)
        space.lookup(chain("a", 3))
        assert client.failures["agent_busy"]
    assert not client.is_silent(time.monotonic() + 1000)
    monkeypatch.setattr(client, "listen", lambda: None)  # to its signs of life
    space.lookup(chain("a", 3))
    until(lambda: agent.fetches.asked)
    assert client.is_silent(time.monotonic() + 1000)


def test_what_is_asked_over_and_over_is_looked_up_once_until_the_agent_says_more(agent, space, monkeypatch):
    """The pool may have lost the pages that landed meanwhile: reading them tells."""
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 3600.0)
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 3600.0)
    keys = chain("a", 5)
    looks = looks_into_the_pool(space, monkeypatch)
    space.lookup(keys)
    asked = until(lambda: agent.fetches.asked)[0]
    asked.tell(Word(coming=4, settled=True))
    settled(space, keys, Lookup(0, False, 4))
    asked.tell(Word(coming=3, landed=2, settled=True))
    settled(space, keys, Lookup(2, False, 1))
    assert looks == [5]
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 0.0)
    asked.tell(Word(coming=4, landed=2, settled=True))
    settled(space, keys, Lookup(0, False, 4))
    assert set(looks) == {5} and len(looks) > 1


def test_nothing_is_promised_any_more_once_the_agent_is_lost(agent, store, space, monkeypatch):
    """Before its asks have ended, which another thread sees to."""
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    keys = chain("a", 5)
    promised(agent, space, keys)
    monkeypatch.setattr(store._client, "ready", False)
    assert space.lookup(keys) == UNHEARD


def test_what_no_single_ask_has_room_for_is_asked_for_as_well(agent, store, space, monkeypatch):
    """The keys that are too many for one are left out when it is sent, and lookups have been answered by then."""
    monkeypatch.setattr("store_client.agent.messages.MAX_KEYS", 4)
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 3600.0)
    keys = chain("a", 6)
    until(lambda: store._client._outbox.empty())
    with store._client._mouth.turn:
        assert space.lookup(keys).pending
    until(lambda: agent.fetches.asked)[0].tell(Word(coming=4))
    until(lambda: store._client.listen() or space._asks[keys[0]].coming)
    until(lambda: space.lookup(keys) and len(agent.fetches.asked) == 2)
    assert list(agent.fetches.asked[1].wish.keys) == keys[4:]


def test_what_was_announced_a_moment_ago_is_not_looked_up_in_the_pool_again(store, space, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 3600.0)
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 3600.0)
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 3600.0)
    keys = chain("a", 5)
    looks = looks_into_the_pool(space, monkeypatch)
    until(lambda: store._client.ready)
    space.prefetch(keys)
    first, second = space.lookup(keys), space.lookup(keys)
    assert first.pending and second.pending and 0 < second.wait_s < first.wait_s < 3600
    assert looks == [5]
    assert space.lookup(keys[:4]).pending and looks == [5, 4], "another chain is another question"


def test_a_sign_of_life_before_the_first_word_on_pages_is_not_that_word(agent, store, space, monkeypatch):
    """The agent says every second how each ask stands, also one of which it knows nothing yet."""
    monkeypatch.setattr("store_client.agent.client._SILENT_S", 3600.0)
    keys = chain("a", 3)
    space.prefetch(keys, patient=True)
    asked = until(lambda: agent.fetches.asked)[0]
    asked.tell(Word())
    until(lambda: space.lookup(keys) and not store._client._awaits_s)
    assert space.lookup(keys) == Lookup(0, pending=True)
    asked.tell(Word(coming=2))
    settled(space, keys, Lookup(0, True, 2))
    asked.tell(Word())  # the tier that had them is gone, and others are asked
    settled(space, keys, UNHEARD)


def test_while_it_is_not_settled_what_comes_the_answer_is_pending_also_where_all_that_came_has_landed(
    agent, space, inner
):
    keys = chain("a", 5)
    space.lookup(keys)
    asked = until(lambda: agent.fetches.asked)[0]
    put_chain(inner, keys[:3])
    asked.tell(Word(coming=3, landed=3))
    settled(space, keys, Lookup(3, pending=True))
    asked.tell(Word(coming=5, landed=3, settled=True))
    settled(space, keys, Lookup(3, coming=2))


def test_what_has_landed_is_found_although_the_agent_says_no_more_of_it(agent, space, inner, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 3600.0)
    keys = chain("a", 4)
    promised(agent, space, keys)
    put_chain(inner, keys[:3])
    settled(space, keys, Lookup(3, coming=1))


def test_while_pages_are_coming_the_pool_is_looked_into_only_once_it_has_changed(agent, space, inner, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 3600.0)
    keys = chain("a", 4)
    promised(agent, space, keys)
    looks = looks_into_the_pool(space, monkeypatch)
    assert [space.lookup(keys) for _ in range(20)] == [Lookup(0, coming=4)] * 20 and len(looks) <= 1
    put_chain(inner, keys[:3])
    assert space.lookup(keys) == Lookup(3, coming=1), "the very next one sees it"


def test_that_a_page_will_not_come_is_heard_while_nothing_changes_in_the_pool(agent, space, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    keys = chain("a", 4)
    asked = promised(agent, space, keys)
    asked.tell(Word(coming=0, done=True, cause="timeout"))
    settled(space, keys, Lookup(0))


def test_pages_that_were_lost_in_front_of_those_that_come_are_asked_for(agent, space, inner, monkeypatch):
    """Nobody brings them, so they are not promised."""
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 0.0)
    keys = chain("a", 5)
    put_chain(inner, keys[:2])
    promised(agent, space, keys, here=2)
    inner.remove(keys[:2])
    assert space.lookup(keys)[:3:2] == (0, 0)
    again = until(lambda: agent.fetches.asked[1:])[0]
    assert list(again.wish.keys) == keys


def test_a_page_that_is_lost_in_front_of_those_that_come_is_missed_although_nothing_else_changes(
    agent, space, inner, monkeypatch
):
    """The look that met the change was for the pages behind it."""
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    keys = chain("a", 5)
    put_chain(inner, keys[:2])
    promised(agent, space, keys, here=2)
    inner.remove(keys[1:2])
    until(lambda: space.lookup(keys).pages == 1)


def test_what_the_pool_lost_before_it_was_said_to_have_landed_is_missed(agent, space, inner, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    keys = chain("a", 5)
    asked = promised(agent, space, keys)
    put_chain(inner, keys[:2])
    inner.remove(keys[:2])
    assert space.lookup(keys) == Lookup(0, coming=5)
    asked.tell(Word(coming=5, landed=2, settled=True))
    until(lambda: space.lookup(keys).pages == 2)
    settled(space, keys, Lookup(0, coming=5))


def test_what_is_said_again_to_have_landed_is_not_believed_again(agent, store, space, inner, monkeypatch):
    """The agent repeats every second how an ask stands."""
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    keys = chain("a", 5)
    asked = promised(agent, space, keys)
    put_chain(inner, keys[:2])
    asked.tell(Word(coming=5, landed=2, settled=True))
    here = store._client._in_flight[1]
    until(lambda: store._client.listen() or here.landed == 2)
    inner.remove(keys[:2])
    until(lambda: time.monotonic() - here.landed_s > 0.05)
    settled(space, keys, Lookup(0, coming=5))
    said = here.said
    asked.tell(Word(coming=4, landed=2, settled=True))
    until(lambda: store._client.listen() or here.said > said)
    assert space.lookup(keys) == Lookup(0, coming=4)


def test_once_the_agent_has_done_all_it_can_the_pool_is_looked_into_at_once(agent, store, space, inner, monkeypatch):
    """No later lookup may follow."""
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 3600.0)
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 3600.0)
    keys = chain("a", 4)
    asked = promised(agent, space, keys)
    put_chain(inner, keys[:3])
    asked.tell(Word(done=True, settled=True, cause="timeout"))
    until(lambda: store._client.listen() or not store._client._in_flight)
    assert space.lookup(keys) == Lookup(3)


def test_what_an_agent_promised_that_says_nothing_for_long_is_not_coming(agent, space, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    keys = chain("a", 4)
    promised(agent, space, keys)
    monkeypatch.setattr("store_client.agent.asked._STALE_S", 0.0)
    settled(space, keys, Lookup(0))


def test_a_fault_of_the_pool_while_pages_are_coming_is_a_miss_and_counted_once(agent, store, space, inner, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("store_client.agent.tiered._WHOLE_AGAIN_S", 0.0)
    keys = chain("a", 4)
    promised(agent, space, keys)
    put_chain(inner, keys[:1])
    before = store.stats().failures.get("error", 0)
    with monkeypatch.context() as broken:
        broken.setattr("store_client.embedded.reader.Reader.prefix", lambda *args: 1 // 0)
        assert space.lookup(keys) == Lookup(0, coming=4)
    assert store.stats().failures.get("error", 0) == before + 1
    assert space.lookup(keys) == Lookup(1, coming=3)


def test_what_has_landed_is_found_without_reading_what_the_agent_says(agent, store, space, inner, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("store_client.agent.tiered._LISTEN_AGAIN_S", 3600.0)
    keys = chain("a", 5)
    promised(agent, space, keys)
    monkeypatch.setattr(store._client, "listen", lambda: 1 // 0)
    for landed in (2, 4):
        put_chain(inner, keys[:landed])
        assert space.lookup(keys) == Lookup(landed, coming=5 - landed)
    monkeypatch.setattr("store_client.agent.tiered._LISTEN_AGAIN_S", 0.0)
    put_chain(inner, keys)
    assert space.lookup(keys) == Lookup(5), "nothing more is to be said of them"


def test_what_lands_between_a_look_into_the_pool_and_the_agents_last_word_is_found(
    agent, store, space, inner, monkeypatch
):
    monkeypatch.setattr("store_client.agent.tiered._LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr("store_client.agent.tiered._LISTEN_AGAIN_S", 0.0)
    keys = chain("a", 4)
    client = store._client
    asked = promised(agent, space, keys)
    put_chain(inner, keys[:2])
    listen = client.listen

    def late() -> None:
        put_chain(inner, keys[:3])
        asked.tell(Word(coming=3, landed=3, done=True, settled=True, cause="undelivered"))
        until(lambda: listen() or not client._in_flight)

    monkeypatch.setattr(client, "listen", late)
    assert space.lookup(keys).pages == 3


def test_nothing_is_heard_in_the_moment_in_which_no_agent_can_have_answered(agent, store, space, monkeypatch):
    """A prompt is looked up right after it was announced: that answer is the announcement's."""
    monkeypatch.setattr("store_client.agent.tiered._SOONEST_WORD_S", 3600.0)
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 3600.0)
    keys = chain("a", 5)
    space.prefetch(keys)
    with monkeypatch.context() as deaf:
        deaf.setattr(store._client, "listen", lambda: 1 // 0)
        assert space.lookup(keys).pending
    until(lambda: agent.fetches.asked)[0].tell(Word(coming=5, settled=True))
    until(lambda: store._client.listen() or space.lookup(keys) == Lookup(0, coming=5), "once heard it counts")


def test_the_wait_of_an_answer_that_is_kept_ends_when_it_would_have(space, monkeypatch):
    monkeypatch.setattr("store_client.agent.tiered._SOONEST_WORD_S", 3600.0)
    monkeypatch.setattr("store_client.agent.patience.LEAST_S", 0.05)
    keys = chain("a", 5)
    space.prefetch(keys)
    settled(space, keys, UNHEARD)


def test_which_shards_tiers_have_is_listened_for_only_while_an_answer_is_due(agent, store, monkeypatch):
    agent.fetches.elsewhere = [SHARD]
    until(lambda: store.shards_elsewhere(namespace()) == [SHARD] and not store._client._places.wonders)
    space_of(store).prefetch(chain("a", 3))
    monkeypatch.setattr(store._client, "listen", lambda: 1 // 0)
    assert store.shards_elsewhere(namespace()) == [SHARD]


def test_what_the_pool_has_in_another_shard_is_there_although_the_own_pages_are_coming(
    agent, store, inner, monkeypatch
):
    """From a slow tier, say, while an instance of another size has just computed them."""
    monkeypatch.setattr("store_client.sharded._LOOK_S", 0.0)
    keys, half = chain("a", 3), Shard(0, SHARD.layer_stop, 0, 1)
    view = ShardView(store, namespace(), half, PAGE_NBYTES // SHARD.num_units)
    view.prefetch(keys)
    until(lambda: agent.fetches.asked)[0].tell(Word(coming=3, settled=True))
    until(lambda: view.lookup(keys) == Lookup(0, coming=3))
    put_chain(inner, keys)
    assert view.lookup(keys).pages == 3
