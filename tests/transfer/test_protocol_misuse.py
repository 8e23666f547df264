"""Calls in a wrong order, and messages of any kind in any order: errors or nothing, and never a broken promise."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples
from simulated.network import places
from simulated.sides import (
    KEY,
    LAYERS,
    announce,
    answers,
    close,
    ended,
    granted,
    introduction,
    land,
    landed,
    make_consumer,
    make_producer,
    open_producer,
    orders,
    report,
    status,
)

from transfer.plan.layout import LayoutError, Table
from transfer.protocol.messages import State
from transfer.protocol.orders import Ended, Ending, Revoke, Verify, Write

WRONG_AT_THE_PRODUCER = {
    "written to no peer": lambda p: p.written("D1", "t", 0, [1], None, 1.0),
    "written of no batch": lambda p: p.written("D0", "t", 1, [1], None, 1.0),
}


@pytest.mark.parametrize("wrong", WRONG_AT_THE_PRODUCER)
def test_a_call_that_cannot_be_meant_is_an_error_and_changes_nothing_at_the_producer(wrong):
    producer = open_producer("D0")
    producer.computed("t", 0, 8, 0.0)
    producer.take()
    with pytest.raises(ValueError, match="transfer"):
        WRONG_AT_THE_PRODUCER[wrong](producer)
    assert producer.take() == []
    producer.finished("t", 8, 1.0)
    for number in (0, 1):
        producer.written("D0", "t", number, [1], None, 1.0)
        with pytest.raises(ValueError, match="no write"):
            producer.written("D0", "t", number, [1], None, 1.0)
    producer.receive("D0", close(), 2.0)
    assert ended(producer) == [("t", Ending.DONE, "")]


@pytest.mark.parametrize(
    "again",
    [lambda p: p.finished("t", 16, 1.0), lambda p: p.computed("t", 1, 16, 1.0), lambda p: p.preempted("t", 1.0)],
    ids=["finished", "computed", "preempted"],
)
def test_when_prefill_is_over_nothing_more_is_computed(again):
    producer = open_producer()
    producer.finished("t", 8, 0.0)
    with pytest.raises(ValueError, match="finished already"):
        again(producer)
    producer.receive("D0", granted(stop_token=16), 2.0)
    assert [write.batch.stop_token for write in orders(producer, Write)] == [8]


WRONG_AT_THE_CONSUMER = {
    "grant twice": lambda c: c.grant("t", 0, 8, [5], KEY, 1.0),
    "verified from no peer": lambda c: c.verified("P7", "t", landed(), True, 1.0),
    "verified of no batch": lambda c: c.verified("P0", "t", landed(batch=1), True, 1.0),
    "verified of another batch": lambda c: c.verified("P0", "t", landed(stop_token=4), True, 1.0),
}


@pytest.mark.parametrize("wrong", WRONG_AT_THE_CONSUMER)
def test_a_call_that_cannot_be_meant_is_an_error_and_changes_nothing_at_the_consumer(wrong):
    consumer = make_consumer()
    consumer.receive("P0", landed(), 0.5)
    consumer.take()
    with pytest.raises(ValueError, match="transfer"):
        WRONG_AT_THE_CONSUMER[wrong](consumer)
    assert consumer.take() == [] and consumer.held == ["t"]
    consumer.verified("P0", "t", landed(), True, 1.0)
    assert orders(consumer, Revoke) == [Revoke(consumer.records["t"])]


@pytest.mark.parametrize("first, stop", [(8, 4), (-1, 4)])
def test_tokens_that_cannot_be_are_an_error(first, stop):
    with pytest.raises(LayoutError, match=f"tokens {first}..{stop - 1}"):
        Table(first, stop, [5])


def test_a_check_has_one_result():
    consumer = make_consumer(sources=2)
    land(consumer)
    with pytest.raises(ValueError, match="no check of batch 0 from P0"):
        consumer.verified("P0", "t", landed(), False, 1.0)


def test_messages_meant_for_the_other_side_do_nothing():
    producer, consumer = make_producer(), make_consumer()
    assert answers(producer, status()) == []
    assert answers(producer, introduction()) == []
    assert answers(consumer, introduction(), "P0") == []
    assert answers(consumer, close(), "P0") == []


# Anything at all

few = st.integers(0, 3)
head = {
    "transfer": st.sampled_from(["t", "t", "u"]),
    "number": st.integers(1, 3),
}
to_producer = st.one_of(
    st.builds(announce, **head, destinations=few, computed=st.booleans()),
    st.builds(
        granted,
        **head,
        destinations=few,
        computed=st.booleans(),
        first_token=st.sampled_from([0, 2, 4]),
        stop_token=st.sampled_from([4, 5, 8]),
    ),
    st.builds(granted, **head),
    st.builds(report, **head, verified=few, again=st.lists(few)),
    st.builds(close, **head, destinations=few, done=st.booleans()),
)
peers = st.sampled_from(["D0", "D1", "stranger"])
calls = st.sampled_from(["open", "computed", "finished", "preempted", "cancel", "tick", "lease"])


@settings(max_examples=examples(300))
@given(st.lists(st.one_of(st.tuples(peers, to_producer), calls), max_size=40), st.booleans())
def test_no_message_makes_a_producer_raise_release_twice_or_hold_for_ever(steps, works):
    producer, now_s = make_producer(), 0.0
    opened, finished, released = Counter(), set(), Counter()

    def obey() -> None:
        while given := producer.take():
            for order in given:
                if isinstance(order, Write):
                    error = None if works else "broken"
                    producer.written(order.peer, order.transfer.name, order.number, [1], error, now_s)
                elif isinstance(order, Ended):
                    released[order.transfer.name] += 1

    for step in steps:
        now_s += 0.5
        held = producer.held
        if step == "open" and not held:
            producer.open("t", now_s)
            opened["t"] += 1
            if not producer.held:
                producer.cancel("t", "refused", now_s)
        elif step == "computed" and "t" in held and "t" not in finished:
            producer.computed("t", 0, 4, now_s)
        elif step == "finished" and "t" in held and "t" not in finished:
            producer.finished("t", 8, now_s)
            finished.add("t")
        elif step == "preempted" and "t" in held and "t" not in finished:
            producer.preempted("t", now_s)
        elif step == "cancel" and "t" in held:
            producer.cancel("t", "", now_s)
        elif step in ("tick", "lease"):
            now_s += 40.0 if step == "lease" else 1.0
            producer.tick(now_s)
        elif isinstance(step, tuple):
            producer.receive(*step, now_s)
        obey()
        if not producer.held:
            finished.clear()
    for transfer in producer.held:
        producer.cancel(transfer, "", now_s)
    obey()
    assert producer.held == [] and released == opened
    for _ in range(3):
        now_s += 31.0
        producer.tick(now_s)
    assert producer.tick(now_s) is None


from_producer = {
    "transfer": st.sampled_from(["t", "t", "t", "u"]),
    "number": st.sampled_from([1, 1, 2]),
}
to_consumer = st.one_of(
    st.builds(
        landed,
        **from_producer,
        batch=few,
        attempt=st.integers(0, 1),
        first_layer=few,
        num_layers=few,
        first_token=st.sampled_from([0, 4]),
        stop_token=st.sampled_from([4, 8]),
    ),
    st.builds(status, **from_producer, state=st.sampled_from([State.OPEN, State.OPEN, State.FAILED, State.CLOSED])),
)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["P0", "P1"]), to_consumer), st.sampled_from(["grant", "tick", "lost"])
        ),
        max_size=40,
    ),
    st.lists(st.booleans(), min_size=1),
)
def test_no_message_makes_a_consumer_raise_end_twice_or_call_done_what_is_not_there(steps, rights):
    consumer, now_s, checks = make_consumer(has_grant=False), 0.0, 0
    arrived: Counter[tuple[int, int]] = Counter()
    endings: list[Ending] = []

    def obey() -> None:
        nonlocal checks
        while given := consumer.take():
            for order in given:
                if isinstance(order, Verify):
                    checks += 1
                    right = rights[checks % len(rights)]
                    if right:
                        arrived.update(places(order.landed.part))
                    consumer.verified(order.peer, order.transfer.name, order.landed, right, now_s)
                elif isinstance(order, Revoke):
                    consumer.revoked(order.transfer.name, now_s)
                elif isinstance(order, Ended):
                    endings.append(order.transfer.ending)

    for step in steps:
        now_s += 0.5
        if step == "grant" and not consumer.records["t"].is_granted:
            consumer.grant("t", 0, 8, [5], KEY, now_s)
        elif step == "tick":
            consumer.tick(now_s)
        elif step == "lost":
            consumer.lost("P0", now_s)
        elif isinstance(step, tuple):
            consumer.receive(*step, now_s)
        obey()
    consumer.tick(now_s + 200.0)
    obey()
    consumer.cancel("t", "", now_s + 200.0)
    obey()
    assert len(endings) == 1
    if endings == [Ending.DONE]:
        assert arrived == Counter({(layer, token): 1 for layer in LAYERS for token in range(8)})
    consumer.tick(now_s + 300.0)
    assert consumer.tick(now_s + 300.0) is None
