"""What the consumer's side makes of single calls and messages, also of such as no well-behaved peer sends."""

from __future__ import annotations

import pytest
from simulated.sides import (
    KEY,
    LAYERS,
    NamedConsumer,
    answers,
    cancelled_consumer,
    ended,
    land,
    landed,
    make_consumer,
    orders,
    status,
)

from transfer.plan.layout import Table
from transfer.protocol.consumer import Consumer
from transfer.protocol.incoming import Incoming, Source
from transfer.protocol.messages import Close, Granted, Report, State
from transfer.protocol.orders import Ended, Ending, Failed, Revoke, Send, Timing, Verify


@pytest.mark.parametrize(
    "changes",
    [
        {"first_layer": 1},
        {"num_layers": 0},
        {"num_layers": 3},
        {"stop_token": 9},
        {"first_token": 8},
        {"first_layer": 2},
        {"batch": 16},
    ],
)
def test_a_batch_that_is_not_in_what_was_granted_fails_the_transfer(changes):
    consumer = make_consumer()
    consumer.receive("P0", landed(**changes), 1.0)
    given = consumer.take()
    assert Revoke(consumer.records["t"]) in given and not any(isinstance(order, Verify) for order in given)


def test_batches_that_overlap_do_not_make_a_transfer_complete():
    consumer = make_consumer()
    parts = [landed(stop_token=6, batch=0), landed(first_token=4, stop_token=6, batch=1)]
    for part in parts:
        land(consumer, part)
    consumer.revoked("t", 1.0)
    assert ended(consumer) == [("t", Ending.FAILED, "batches overlap")]


def test_a_batch_said_twice_is_checked_once_and_confirmed_again():
    consumer = make_consumer()
    part = landed(stop_token=4)
    for _ in range(2):
        consumer.receive("P0", part, 1.0)
    assert len(orders(consumer, Verify)) == 1
    consumer.verified("P0", "t", part, True, 1.0)
    consumer.take()
    (again,) = answers(consumer, part, "P0")
    assert isinstance(again, Report) and again.verified == 1


def test_batches_are_confirmed_up_to_the_first_that_is_missing():
    consumer = make_consumer()
    parts = {number: landed(batch=number, first_token=2 * number, stop_token=2 * number + 2) for number in range(3)}
    verified = []
    for number in (0, 2, 1):
        land(consumer, parts[number])
        verified += [order.message.verified for order in orders(consumer, Send)]
    assert verified == [1, 1, 3]


def test_one_peer_session_that_is_done_does_not_make_the_transfer_done():
    consumer = make_consumer(sources=2)
    land(consumer)
    assert orders(consumer, Revoke) == []
    land(consumer, peer="P1")
    assert orders(consumer, Revoke) == [Revoke(consumer.records["t"])]


def test_a_producer_that_is_silent_from_the_start_is_given_up_before_there_are_blocks():
    consumer = NamedConsumer()
    consumer.announce("t", [Source("P0", [LAYERS], 1)], 1000.0, computed=True)
    consumer.tick(1029.9)
    assert consumer.held == ["t"]
    consumer.tick(1030.0)
    (failed,) = orders(consumer, Failed)
    assert "said nothing for 30 s" in failed.transfer.cause


def test_the_silence_of_a_producer_counts_from_the_grant_too():
    consumer = NamedConsumer()
    consumer.announce("t", [Source("P0", [LAYERS], 1)], 1000.0, computed=True)
    consumer.receive("P0", status(has_grant=False), 1025.0)
    consumer.tick(1049.0)
    assert consumer.held == ["t"]
    consumer.grant("t", 0, 8, [5], KEY, 1050.0)
    consumer.tick(1079.9)
    assert consumer.held == ["t"] and orders(consumer, Revoke) == []
    consumer.tick(1080.0)
    assert orders(consumer, Revoke) == [Revoke(consumer.records["t"])]


def test_nothing_is_said_of_a_name_whose_earlier_transfer_found_nobody():
    """That one may be open at the producer, which would take this one for it."""
    consumer = NamedConsumer()
    consumer.announce("t", [], 0.0, computed=False)
    consumer.cancel("t", "failed", 0.1)
    consumer.tick(1.0)
    consumer.take()
    consumer.announce("t/2", [Source("P0", [LAYERS], 1)], 2.0, computed=False)
    for now_s in (2.0, 10.0, 29.0):
        consumer.tick(now_s)
    assert orders(consumer, Send) == [] and consumer.held == ["t/2"]
    consumer.tick(30.2)
    consumer.tick(31.0)
    (failed,) = orders(consumer, Failed)
    assert "earlier transfer of this name" in failed.transfer.cause


def test_a_producer_that_has_sent_all_may_fall_silent_while_others_send():
    consumer = make_consumer(sources=2)
    land(consumer)
    consumer.receive("P1", status(), 25.0)
    consumer.tick(40.0)
    assert orders(consumer, Revoke) == []


def test_nothing_is_read_from_a_transfer_that_has_no_grant():
    consumer = make_consumer(has_grant=False)
    consumer.receive("P0", landed(), 1.0)
    assert orders(consumer, Verify, Ended) == []


@pytest.mark.parametrize("message", [landed(transfer="gone"), status(transfer="gone"), landed(number=7)])
def test_a_producer_that_serves_what_is_not_wanted_is_told_to_stop(message):
    (answer,) = answers(make_consumer(), message, "P0")
    assert isinstance(answer, Close) and not answer.done and answer.number == message.number


def test_what_is_over_on_both_sides_is_not_spoken_of():
    assert answers(make_consumer(), status(transfer="gone", state=State.CLOSED), "P0") == []


def test_a_producer_that_thinks_it_is_over_ends_the_transfer():
    consumer = make_consumer()
    consumer.receive("P0", status(state=State.CLOSED), 1.0)
    consumer.revoked("t", 1.0)
    assert ended(consumer) == [("t", Ending.FAILED, "the producer gave up: closed")]


def test_what_lands_after_the_end_is_not_read():
    consumer = make_consumer()
    consumer.cancel("t", "client gone", 1.0)
    consumer.take()
    consumer.receive("P0", landed(), 1.0)
    assert orders(consumer, Verify) == []


def test_wrong_bytes_are_not_checked_again_until_they_came_again():
    consumer = make_consumer()
    land(consumer, right=False)
    consumer.take()
    consumer.receive("P0", landed(), 1.1)
    assert orders(consumer, Verify) == []
    consumer.receive("P0", landed(attempt=1), 1.2)
    assert len(orders(consumer, Verify)) == 1


def test_what_is_asked_for_again_is_asked_each_second_until_it_comes():
    consumer = make_consumer()
    land(consumer, right=False)
    consumer.take()
    asked = []
    for now_s in (1.5, 2.0, 2.5, 3.0):
        consumer.tick(now_s)
        asked += [(now_s, order.message.again) for order in orders(consumer, Send)]
    assert asked == [(2.0, [0]), (3.0, [0])]


def test_a_check_that_comes_back_after_the_end_changes_nothing():
    consumer = make_consumer()
    consumer.receive("P0", landed(), 1.0)
    consumer.cancel("t", "client gone", 1.0)
    consumer.revoked("t", 1.0)
    consumer.take()
    consumer.verified("P0", "t", landed(), True, 1.0)
    consumer.revoked("t", 1.0)
    consumer.cancel("t", "again", 1.0)
    assert consumer.take() == []


def test_a_check_for_an_earlier_transfer_of_that_name_changes_nothing():
    consumer = make_consumer()
    consumer.receive("P0", landed(), 1.0)
    consumer.cancel("t", "client gone", 1.0)
    consumer.revoked("t", 1.0)
    earlier = consumer.records["t"]
    consumer.announce("t", [Source("P0", [LAYERS], 1)], 2.0, computed=True)
    consumer.grant("t", 0, 8, [6], KEY, 2.0)
    consumer.take()
    Consumer.verified(consumer, "P0", earlier, landed(), True, 2.0)
    assert consumer.take() == []


def test_a_close_is_repeated_until_it_is_known_and_for_one_lease_at_most():
    for confirmed in (True, False):
        consumer = cancelled_consumer()
        if confirmed:
            consumer.receive("P0", status(state=State.CLOSED), 1.5)
        times = [now_s for now_s in range(2, 100) if consumer.tick(now_s) is not None or orders(consumer, Send)]
        assert times == ([] if confirmed else list(range(2, 2 + int(Timing().lease_s))))


def test_a_second_request_of_a_name_under_way_fails_and_leaves_the_first_alone():
    consumer = make_consumer()
    second = Incoming("t")
    Consumer.announce(consumer, second, 1.0)
    assert consumer.take() == [Failed(second)]
    assert not Consumer.grant(consumer, second, [Table(0, 8, [5])], KEY, 2.0)
    assert consumer.take() == [Ended(second)] and consumer.held == ["t"]


def test_what_is_cancelled_before_its_sources_are_known_is_still_said_to_them():
    consumer = NamedConsumer()
    transfer = Incoming("t", computed=True)
    Consumer.announce(consumer, transfer, 0.0)
    Consumer.cancel(consumer, transfer, "client gone", 1.0)
    assert consumer.take() == [Ended(transfer)]
    consumer.found(transfer, [Source("P0", [LAYERS], 1)], 2.0)
    (order,) = consumer.take()
    assert isinstance(order.message, Close) and order.message.cause == "client gone"


def test_blocks_may_be_granted_before_the_sources_are_known():
    consumer = NamedConsumer()
    transfer = Incoming("t")
    Consumer.announce(consumer, transfer, 0.0)
    assert Consumer.grant(consumer, transfer, [Table(0, 8, [5])], KEY, 1.0) and consumer.take() == []
    consumer.found(transfer, [Source("P0", [LAYERS], 1)], 2.0)
    (order,) = consumer.take()
    assert isinstance(order.message, Granted) and order.message.tables == [Table(0, 8, [5])]


# Producers that are gone for certain


def test_what_was_begun_with_a_producer_that_is_gone_fails_at_once_and_nobody_is_told():
    consumer = make_consumer(sources=2)
    consumer.lost("P0", 1.0)
    given = consumer.take()
    assert given[-1] == Revoke(consumer.records["t"])
    assert [(order.peer, type(order.message)) for order in given[:-1]] == [("P1", Close)]
    consumer.revoked("t", 1.0)
    assert ended(consumer) == [("t", Ending.FAILED, "the producer is gone")]
    consumer.receive("P1", status(state=State.CLOSED), 1.0)
    assert consumer.tick(1.0) is None


def test_a_transfer_without_blocks_is_said_to_have_failed_and_ends_when_the_engine_has_heard_of_it():
    consumer = NamedConsumer()
    consumer.announce("t", [Source("P0", [LAYERS], 1)], 0.0, computed=False)
    consumer.lost("P0", 1.0)
    assert orders(consumer, Failed) == [Failed(consumer.records["t"])]
    assert consumer.tick(100.0) is not None
    consumer.cancel("t", "not needed", 101.0)
    assert ended(consumer) == [("t", Ending.FAILED, "the producer is gone")]
    assert consumer.tick(101.0) is None


def test_what_a_producer_that_is_gone_had_to_be_told_is_not_said_any_more():
    consumer = cancelled_consumer()
    consumer.lost("P0", 1.5)
    assert consumer.tick(100.0) is None and orders(consumer, Send) == []


def test_the_loss_of_one_peer_changes_nothing_for_others():
    consumer = make_consumer()
    consumer.lost("P1", 1.0)
    assert consumer.take() == [] and consumer.held == ["t"]
    assert answers(consumer, landed(), "P0") == [] and consumer.held == ["t"]
