"""What becomes of what was begun with a producer that is gone for certain."""

from __future__ import annotations

from simulated.sides import LAYERS, NamedConsumer, answers, ended, landed, make_consumer, orders, status

from transfer.protocol.consumer import Source
from transfer.protocol.messages import Close, State
from transfer.protocol.orders import Ending, Failed, Revoke, Send


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
    consumer = make_consumer()
    consumer.cancel("t", "client gone", 1.0)
    consumer.revoked("t", 1.0)
    consumer.take()
    consumer.lost("P0", 1.5)
    assert consumer.tick(100.0) is None and orders(consumer, Send) == []


def test_the_loss_of_one_peer_changes_nothing_for_others():
    consumer = make_consumer()
    consumer.lost("P1", 1.0)
    assert consumer.take() == [] and consumer.held == ["t"]
    assert answers(consumer, landed(), "P0") == [] and consumer.held == ["t"]
