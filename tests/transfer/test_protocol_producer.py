"""What the producer's side makes of single calls and messages, also of such as no well-behaved peer sends."""

from __future__ import annotations

import pytest
from simulated.sides import (
    announce,
    answers,
    close,
    divide,
    ended,
    granted,
    make_producer,
    open_producer,
    orders,
    report,
)

from transfer.plan.granularity import Batch
from transfer.protocol.messages import Landed, State
from transfer.protocol.orders import Abandon, Ended, Ending, Send, Write
from transfer.protocol.outgoing import Outgoing
from transfer.protocol.producer import Producer


def test_what_was_closed_before_the_engine_named_it_is_released_when_it_has_computed_it():
    producer = make_producer()
    producer.receive("D0", close(done=False, cause="client gone"), 0.0)
    producer.take()
    producer.open("t", 1.0)
    assert ended(producer) == []
    producer.finished("t", 8, 2.0)
    assert ended(producer) == [("t", Ending.CANCELLED, "client gone")]
    assert orders(producer, Write) == []


@pytest.mark.parametrize("message", [report(), announce(computed=True), granted(computed=True)])
def test_what_the_producer_should_know_and_does_not_is_refused_at_once(message):
    (answer,) = answers(make_producer(), message)
    assert (answer.state, answer.number) == (State.FAILED, message.number) and "not known" in answer.cause


def test_blocks_are_released_when_every_rank_is_through_and_not_before():
    producer = open_producer()
    producer.receive("D0", close(destinations=2), 1.0)
    producer.finished("t", 8, 1.0)
    assert ended(producer) == []
    producer.receive("D1", close(destinations=2), 2.0)
    assert ended(producer) == [("t", Ending.DONE, "")]


def test_a_layout_that_cannot_be_mapped_is_the_cause_that_the_consumer_is_told():
    producer = open_producer()
    (first, *_) = answers(producer, granted(), "stranger")
    assert (first.state, first.cause) == (State.FAILED, "blocks of 3 tokens here, of 4 there")


def test_a_peer_session_that_failed_is_said_to_have_until_the_consumer_knows_and_then_nothing_more_is_said():
    producer = open_producer("D0")
    producer.cancel("t", "abort", 0.1)
    producer.take()
    said = []
    for now_s in (0.5, 1.0, 1.5, 2.0, 2.5):
        producer.tick(now_s)
        said += [(now_s, order.message.state) for order in orders(producer, Send)]
    assert said == [(at_s, State.FAILED) for at_s in (0.5, 1.5, 2.5)]
    (answer,) = answers(producer, close(done=False))
    assert answer.state is State.CLOSED
    (answer,) = answers(producer, close(done=False, number=2))
    assert (answer.state, answer.number) == (State.CLOSED, 2)
    for now_s in range(3, 40):
        producer.tick(float(now_s))
    assert orders(producer, Send) == []


@pytest.mark.parametrize("granted_first", [True, False])
def test_more_tokens_than_were_computed_are_not_waited_for(granted_first):
    producer = open_producer()
    if granted_first:
        producer.receive("D0", granted(stop_token=9), 0.0)
        producer.take()
    producer.finished("t", 8, 1.0)
    if not granted_first:
        producer.receive("D0", granted(stop_token=9), 1.0)
    message = orders(producer, Send)[0].message
    assert message.state is State.FAILED and "fewer tokens" in message.cause


@pytest.mark.parametrize("stop_token", [6, 8])
def test_tokens_that_begin_between_two_units_are_refused_unless_there_are_none(stop_token):
    producer = open_producer()
    (answer, *_) = answers(producer, granted(first_token=6, stop_token=stop_token))
    assert answer.state is (State.OPEN if stop_token == 6 else State.FAILED)


def test_a_rank_that_is_through_gets_nothing_more_while_others_do():
    producer = open_producer("D0", "D1")
    producer.receive("D0", close(destinations=2, done=False), 0.5)
    producer.finished("t", 8, 1.0)
    assert [write.peer for write in orders(producer, Write)] == ["D1"]


def test_a_silent_rank_is_given_up_though_another_is_heard_and_prefill_goes_on():
    producer = open_producer()
    producer.receive("D0", granted(destinations=2), 0.0)
    for now_s in range(0, 30, 5):
        producer.receive("D1", granted(destinations=2), float(now_s))
    producer.tick(29.9)
    assert State.FAILED not in [order.message.state for order in orders(producer, Send)]
    producer.tick(30.0)
    failed = [order.peer for order in orders(producer, Send) if order.message.state is State.FAILED]
    assert failed == ["D0"] and producer.held == ["t"]
    producer.tick(40.0)
    assert {order.peer for order in orders(producer, Send)} == {"D1"}  # nobody listens at D0


def test_a_late_grant_gets_at_once_all_that_was_computed():
    producer = open_producer()
    producer.computed("t", 1, 4, 0.0)
    producer.computed("t", 0, 8, 0.0)
    producer.receive("D0", granted(), 1.0)
    assert [write.batch for write in orders(producer, Write)] == [Batch(0, 2, 0, 4), Batch(0, 1, 4, 8)]


def test_a_later_grant_waits_until_the_first_transfer_is_over():
    producer = open_producer("D0")
    assert answers(producer, granted(number=2)) == []
    producer.finished("t", 8, 1.0)
    assert [write.granted.number for write in orders(producer, Write)] == [1]
    producer.written("D0", "t", 0, [1], None, 1.0)
    assert answers(producer, granted(number=2)) == []
    producer.receive("D0", close(), 2.0)
    (message,) = answers(producer, granted(number=2))
    assert (message.state, message.number) == (State.OPEN, 2)


@pytest.mark.parametrize("message", [report(number=2, again=[0]), report(again=[1]), close(number=2)])
def test_a_report_or_close_of_another_transfer_or_batch_changes_nothing(message):
    producer = open_producer("D0")
    producer.finished("t", 8, 1.0)
    producer.written("D0", "t", 0, [1], None, 1.0)
    producer.take()
    producer.receive("D0", message, 2.0)
    assert orders(producer, Write, Ended) == []


def test_a_batch_is_written_again_once_however_often_that_is_asked():
    producer = open_producer("D0")
    producer.finished("t", 8, 1.0)
    producer.receive("D0", report(again=[0]), 1.5)  # still being written
    producer.written("D0", "t", 0, [1], None, 1.0)
    producer.take()
    for _ in range(3):
        producer.receive("D0", report(again=[0]), 2.0)
    producer.written("D0", "t", 0, [1], None, 3.0)
    producer.receive("D0", report(again=[0]), 4.0)
    assert [write.number for write in orders(producer, Write)] == [0]


def test_writes_under_way_are_abandoned_when_the_consumer_closes():
    producer = open_producer("D0")
    producer.finished("t", 8, 1.0)
    producer.receive("D0", close(done=False), 2.0)
    given = producer.take()
    assert Abandon("D0", producer.records["t"]) in given and not any(isinstance(order, Ended) for order in given)
    producer.written("D0", "t", 0, [], "cancelled", 3.0)
    assert ended(producer) == [("t", Ending.CANCELLED, "")]


def test_only_so_many_transfers_are_awaited_that_no_engine_has_named():
    producer = make_producer()
    for number in range(4096):
        producer.receive("D0", announce(transfer=str(number)), 0.0)
    (message,) = answers(producer, announce(transfer="one more"))
    assert (message.state, message.cause) == (State.FAILED, "too many transfers are awaited")
    (message,) = answers(producer, close(transfer="one more"))
    assert message.state is State.CLOSED
    producer.open("0", 0.0)
    assert answers(producer, announce(transfer="one more"))[0].state is State.OPEN


def test_what_landed_is_said_again_until_it_is_confirmed():
    producer = open_producer("D0")
    producer.computed("t", 0, 8, 0.0)
    producer.computed("t", 1, 8, 0.0)
    for number in (0, 1):
        producer.written("D0", "t", number, [number], None, 0.0)
    producer.take()

    def said(now_s: float) -> list[int]:
        producer.tick(now_s)
        return [m.message.batch for m in orders(producer, Send) if isinstance(m.message, Landed)]

    assert said(0.9) == [] and said(1.0) == [0, 1] and said(1.5) == [] and said(2.0) == [0, 1]
    producer.receive("D0", report(verified=1), 2.0)
    assert said(3.0) == [1]
    producer.receive("D0", report(verified=2), 3.0)
    producer.receive("D0", report(verified=1), 3.0)  # an earlier one that comes late
    assert said(4.0) == []


# Preemption


def preempted(*, sent: bool) -> Producer:
    """A producer whose engine took the blocks after 4 of 8 tokens."""
    producer = open_producer(*["D0"] * sent)
    producer.computed("t", 1, 4, 1.0)
    assert bool(orders(producer, Write)) is sent
    producer.preempted("t", 2.0)
    return producer


def test_a_preempted_request_that_sent_nothing_goes_on_and_sends_what_is_computed_again():
    producer = preempted(sent=False)
    assert producer.take() == []
    producer.receive("D0", granted(), 3.0)
    assert orders(producer, Write) == []
    producer.computed("t", 1, 4, 4.0)
    assert [write.batch for write in orders(producer, Write)] == [Batch(0, 2, 0, 4)]
    producer.finished("t", 8, 5.0)
    assert [write.batch for write in orders(producer, Write)] == [Batch(0, 2, 4, 8)]


def test_a_preempted_request_whose_grant_was_there_before_goes_on_as_well():
    producer = open_producer("D0")
    producer.computed("t", 1, 3, 1.0)  # less than a unit
    producer.preempted("t", 2.0)
    producer.finished("t", 8, 3.0)
    assert [write.batch for write in orders(producer, Write)] == [Batch(0, 2, 0, 8)]


def test_a_preempted_request_that_sent_something_ends_when_no_write_reads_the_blocks():
    producer = preempted(sent=True)
    given = producer.take()
    assert Abandon("D0", producer.records["t"]) in given and not any(isinstance(order, Ended) for order in given)
    (message,) = [order.message for order in given if isinstance(order, Send)]
    assert (message.state, message.cause) == (State.FAILED, "preempted")
    producer.written("D0", "t", 0, [1], None, 3.0)
    producer.finished("t", 8, 4.0)
    assert ended(producer) == [("t", Ending.CANCELLED, "preempted")]


def test_a_preempted_request_whose_batch_landed_ends_too():
    producer = open_producer("D0")
    producer.computed("t", 1, 4, 1.0)
    producer.written("D0", "t", 0, [1], None, 1.0)
    producer.take()
    producer.preempted("t", 2.0)
    producer.computed("t", 1, 8, 3.0)
    assert orders(producer, Write) == []
    producer.finished("t", 8, 4.0)
    assert ended(producer) == [("t", Ending.CANCELLED, "preempted")]


def test_what_an_earlier_run_computed_is_not_taken_for_what_a_later_one_has():
    producer = preempted(sent=False)
    producer.receive("D0", granted(), 3.0)
    producer.computed("t", 1, 8, 3.5, run=0)  # the device was late
    assert orders(producer, Write) == []
    producer.computed("t", 1, 4, 4.0, run=1)
    assert [write.batch for write in orders(producer, Write)] == [Batch(0, 2, 0, 4)]


def test_a_second_request_of_one_name_fails_when_it_is_finished_and_leaves_the_first_alone():
    producer = open_producer()
    second = Outgoing("t")
    Producer.open(producer, second, 1.0)
    Producer.finished(producer, second, 8, 2.0)
    assert [(over.transfer, over.transfer.ending) for over in orders(producer, Ended)] == [(second, Ending.FAILED)]
    assert producer.held == ["t"]


def test_a_name_is_refused_for_a_lease_where_names_do_not_return():
    producer = Producer(divide)
    first, second = Outgoing("t"), Outgoing("t")
    producer.open(first, 0.0)
    producer.finished(first, 8, 0.0)
    producer.receive("D0", announce(), 0.5)
    producer.receive("D0", close(), 0.5)
    (answer,) = answers(producer, announce(number=2))
    assert answer.state is State.FAILED and "is over" in answer.cause
    (answer,) = answers(producer, close(number=2))
    assert (answer.state, answer.number) == (State.CLOSED, 2)
    producer.open(second, 2.0)
    assert second.ending is Ending.FAILED
    producer.tick(31.0)
    third = Outgoing("t")
    producer.open(third, 31.0)
    assert third.ending is None


def test_what_ended_before_is_not_ended_again_by_preemption():
    producer = open_producer()
    producer.receive("D0", close(done=False, cause="client gone"), 1.0)
    producer.preempted("t", 2.0)
    producer.finished("t", 8, 3.0)
    assert ended(producer) == [("t", Ending.CANCELLED, "client gone")]


# The next of a name, before the one before is over


class Following:
    """A transfer that was cancelled while a write reads its blocks, and the next of its name, already named."""

    def __init__(self) -> None:
        self.producer = open_producer("D0")
        self.producer.finished("t", 8, 1.0)
        self.producer.cancel("t", "abort", 1.0)
        self.second = Outgoing("t", "t/2")
        Producer.open(self.producer, self.second, 2.0)
        assert ended(self.producer) == [] and self.second.ending is None

    def leave(self) -> None:
        """The write is over, and the consumer has closed."""
        self.producer.receive("D0", close(done=False), 3.0)
        self.producer.written("D0", "t", 0, [], "cancelled", 3.0)
        assert (ended(self.producer)) == [("t", Ending.CANCELLED, "abort")]


def test_the_next_of_a_name_waits_for_the_write_of_the_one_before():
    case = Following()
    assert answers(case.producer, granted(number=2)) == []
    Producer.finished(case.producer, case.second, 8, 2.5)
    case.leave()
    (message, *_) = answers(case.producer, granted(number=2))
    assert (message.state, message.number) == (State.OPEN, 2)
    Producer.written(case.producer, "D0", case.second, 0, [1], None, 3.5)
    case.producer.receive("D0", close(number=2), 4.0)
    assert case.second.ending is Ending.DONE


def test_where_it_is_cancelled_meanwhile_it_ends_once_and_consumers_are_told():
    case = Following()
    Producer.cancel(case.producer, case.second, "client gone", 2.5)
    assert ended(case.producer) == [("t", Ending.CANCELLED, "client gone")]
    case.leave()
    message, *_ = answers(case.producer, announce(number=2))
    assert message.state is State.FAILED and "client gone" in message.cause


def test_a_third_one_is_refused_and_a_closed_side_fails_the_next_as_well():
    case = Following()
    third = Outgoing("t", "t/3")
    Producer.open(case.producer, third, 2.5)
    assert third.ending is Ending.FAILED
    Producer.finished(case.producer, case.second, 8, 2.5)
    case.producer.close("the instance is closed", 3.0)
    assert [(over.transfer.request, over.transfer.ending) for over in orders(case.producer, Ended)] == [
        ("t", Ending.CANCELLED),
        ("t/2", Ending.FAILED),
    ]


def test_it_fails_where_a_consumer_rank_of_the_one_before_was_never_heard():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(destinations=2), 0.0)
    producer.finished("t", 8, 1.0)
    producer.cancel("t", "abort", 1.0)
    second = Outgoing("t", "t/2")
    Producer.open(producer, second, 2.0)
    Producer.awaited(producer, second, 2.0)
    producer.take()
    producer.written("D0", "t", 0, [], "cancelled", 3.0)
    assert [(over.transfer.request, over.transfer.ending) for over in orders(producer, Ended)] == [
        ("t", Ending.CANCELLED),
        ("t/2", Ending.FAILED),
    ]
