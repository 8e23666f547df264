"""Which life of a peer a half of the PD protocol listens to, and what becomes of what was begun with another."""

from __future__ import annotations

import pytest
from simulated.halves import (
    KEY,
    LAYERS,
    announce,
    answers,
    close,
    granted,
    landed,
    make_consumer,
    make_producer,
    orders,
    status,
)

from transfer.protocol.consumer import Consumer, Source
from transfer.protocol.messages import Close, Reset, State
from transfer.protocol.orders import Abandon, Ending, Release, Revoke, Send, Write


def test_a_message_from_an_earlier_life_of_the_peer_is_dropped():
    producer = make_producer()
    producer.met("D0", 21, 0.0)
    assert answers(producer, announce(generation=20)) == []
    assert answers(producer, announce(generation=21)) != []


def test_a_message_for_an_earlier_life_is_answered_with_the_present_one_and_no_more():
    producer = make_producer()
    (reset,) = answers(producer, close(to=9))
    assert reset == Reset(generation=10, to=20, transfer="t")
    consumer = make_consumer()
    assert answers(consumer, Reset(generation=10, to=19, transfer="t"), "P0") == []


def test_a_later_life_of_the_producer_ends_what_the_earlier_one_had():
    consumer = make_consumer()
    consumer.receive("P0", Reset(generation=11, to=20, transfer="t"), 1.0)
    assert orders(consumer, Revoke) == [Revoke("t")]
    consumer.revoked("t", 1.0)
    assert orders(consumer, Release) == [Release("t", Ending.FAILED, "the producer restarted")]
    assert consumer.tick(1.0) is None  # nobody is left to be told


def test_what_was_begun_with_a_producer_that_is_gone_fails_at_once_and_nobody_is_told():
    consumer = make_consumer(legs=2)
    consumer.lost("P0", 1.0)
    given = consumer.take()
    assert given[-1] == Revoke("t")
    assert [(order.peer, type(order.message)) for order in given[:-1]] == [("P1", Close)]
    consumer.revoked("t", 1.0)
    assert orders(consumer, Release) == [Release("t", Ending.FAILED, "the producer is gone")]
    consumer.receive("P1", status(state=State.CLOSED), 1.0)
    assert consumer.tick(1.0) is None


def test_a_transfer_that_named_no_life_of_the_producer_fails_when_it_is_gone():
    consumer = Consumer(20)
    consumer.announce("t", [Source("P0", 0, LAYERS, 1)], 0.0, computed=False)
    consumer.lost("P0", 1.0)
    assert orders(consumer, Release) == [Release("t", Ending.FAILED, "the producer is gone")]
    assert consumer.tick(1.0) is None


def test_what_a_producer_that_is_gone_had_to_be_told_is_not_said_any_more():
    consumer = make_consumer()
    consumer.cancel("t", "client gone", 1.0)
    consumer.revoked("t", 1.0)
    consumer.take()
    consumer.lost("P0", 1.5)
    assert consumer.tick(100.0) is None and orders(consumer, Send) == []


def test_blocks_for_a_consumer_that_is_gone_are_released_when_no_write_reads_them():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
    producer.finished("t", 8, 0.0)
    producer.lost("D0", 1.0)
    given = producer.take()
    assert Abandon("D0", "t") in given and not any(isinstance(order, Release) for order in given)
    producer.written("D0", "t", 0, [1], None, 2.0)
    assert orders(producer, Release, Send) == [Release("t", Ending.FAILED, "the consumer is gone")]
    for now_s in range(3, 40):
        producer.tick(float(now_s))
    assert orders(producer, Send) == [] and producer.tick(40.0) is None


def test_the_engine_learns_of_a_consumer_that_went_before_it_named_the_transfer():
    producer = make_producer()
    producer.receive("D0", announce(), 0.0)
    producer.lost("D0", 1.0)
    producer.open("t", 2.0)
    assert orders(producer, Release) == [Release("t", Ending.FAILED, "the consumer is gone")]


def test_a_rank_that_is_gone_does_not_release_what_another_still_fetches():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(legs=2), 0.0)
    producer.receive("D1", granted(legs=2), 0.0)
    producer.lost("D0", 1.0)
    producer.finished("t", 8, 2.0)
    assert [order.peer for order in orders(producer, Write)] == ["D1"] and producer.held == ["t"]


@pytest.mark.parametrize("generation, heard", [(20, False), (21, True)])
def test_of_a_peer_that_is_gone_only_a_later_life_is_listened_to(generation, heard):
    producer = make_producer()
    producer.met("D0", 20, 0.0)
    producer.lost("D0", 1.0)
    assert bool(answers(producer, announce(generation=generation))) is heard


def test_a_peer_that_shakes_hands_again_was_not_gone():
    producer = make_producer()
    producer.met("D0", 20, 0.0)
    producer.lost("D0", 1.0)
    producer.met("D0", 20, 2.0)
    assert answers(producer, announce()) != []


def test_the_loss_of_one_peer_changes_nothing_for_others():
    consumer = make_consumer()
    consumer.lost("P1", 1.0)
    assert consumer.take() == [] and consumer.held == ["t"]
    assert answers(consumer, landed(), "P0") == [] and consumer.held == ["t"]


def test_a_life_that_a_handshake_names_counts_even_if_it_looks_earlier():
    producer = make_producer()
    producer.met("D0", 21, 0.0)
    producer.met("D0", 20, 0.0)
    assert answers(producer, announce(generation=20)) != []


@pytest.mark.parametrize("generation", [0, 11])
def test_a_request_that_names_a_later_life_or_none_is_not_ended_by_its_coming(generation):
    consumer = Consumer(20)
    consumer.met("P0", 10, 0.0)
    consumer.announce("t", [Source("P0", generation, LAYERS, 1)], 0.0, computed=True)
    consumer.met("P0", 11, 1.0)
    assert consumer.held == ["t"]


def test_the_present_life_of_a_producer_that_a_request_names_wrongly_is_not_asked():
    consumer = Consumer(20)
    consumer.met("P0", 11, 0.0)
    consumer.announce("t", [Source("P0", 10, LAYERS, 1)], 0.0, computed=True)
    assert orders(consumer, Release) == [Release("t", Ending.FAILED, "the producer restarted")]
    assert consumer.grant("t", 0, 8, [5], KEY, 0.0) is False
    assert consumer.tick(0.0) is None
