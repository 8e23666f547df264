"""What one half of the PD protocol makes of single calls and messages, such as no well-behaved peer sends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer.base import TransferError
from transfer.consumer import Consumer, Source
from transfer.granularity import Batch, Granularity
from transfer.messages import Announce, AnyMessage, Close, Granted, Landed, Report, Reset, State, Status
from transfer.producer import Producer, Shape
from transfer.protocol import Abandon, Ending, Half, Release, Revoke, Send, Timing, Verify, Write

KEY = b"k" * 16
LAYERS = range(2)


def shape(peer: str, granted: Granted) -> Shape:
    if peer == "stranger":
        raise TransferError("blocks of 3 tokens here, of 4 there")
    return Shape(Granularity.LAYER, LAYERS, 4)


def make_producer() -> Producer:
    return Producer(10, shape)


def make_consumer(legs: int = 1) -> Consumer:
    consumer = Consumer(20)
    consumer.announce("t", [Source(f"P{n}", 10, LAYERS, 1) for n in range(legs)], 0.0, computed=True)
    assert consumer.grant("t", 0, 8, [5], KEY, 0.0)
    consumer.take()
    return consumer


def announce(**changes: object) -> Announce:
    fields = {"generation": 20, "to": 10, "transfer": "t", "grant": 0, "legs": 1, "computed": False}
    return Announce(**{**fields, **changes})


def granted(**changes: object) -> Granted:
    fields = {"generation": 20, "to": 10, "transfer": "t", "grant": 1, "legs": 1, "computed": False}
    return Granted(**{**fields, "first_token": 0, "stop_token": 8, "block_ids": [5], "key": KEY, **changes})


def report(**changes: object) -> Report:
    return Report(**{"generation": 20, "to": 10, "transfer": "t", "grant": 1, "verified": 0, "again": [], **changes})


def close(**changes: object) -> Close:
    fields = {"generation": 20, "to": 10, "transfer": "t", "grant": 1, "legs": 1, "done": True, "cause": ""}
    return Close(**{**fields, **changes})


def landed(**changes: object) -> Landed:
    fields = {"generation": 10, "to": 20, "transfer": "t", "grant": 1, "batch": 0, "attempt": 0, "checksums": [1]}
    return Landed(**{**fields, "first_layer": 0, "num_layers": 2, "first_token": 0, "stop_token": 8, **changes})


def status(**changes: object) -> Status:
    fields = {"generation": 10, "to": 20, "transfer": "t", "grant": 1, "state": State.OPEN, "cause": ""}
    return Status(**{**fields, **changes})


def answers(half: Half, message: AnyMessage, peer: str = "D0") -> list[AnyMessage]:
    half.take()
    half.receive(peer, message, 1.0)
    return [order.message for order in half.take() if isinstance(order, Send)]


def orders(half: Half, *kinds: type) -> list:
    return [order for order in half.take() if isinstance(order, kinds)]


# Lives


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


# The producer


def test_what_was_closed_before_the_engine_named_it_is_released_when_it_does():
    producer = make_producer()
    producer.receive("D0", close(grant=0, done=False, cause="client gone"), 0.0)
    producer.take()
    producer.open("t", 1.0)
    assert orders(producer, Release) == [Release("t", Ending.CANCELLED, "client gone")]


@pytest.mark.parametrize("message", [report(), announce(computed=True), granted(computed=True)])
def test_what_the_producer_should_know_and_does_not_is_refused_at_once(message):
    (answer,) = answers(make_producer(), message)
    assert (answer.state, answer.grant) == (State.FAILED, message.grant) and "not known" in answer.cause


def test_blocks_are_released_when_every_rank_is_through_and_not_before():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", close(legs=2), 1.0)
    producer.finished("t", 8, 1.0)
    assert orders(producer, Release) == []
    producer.receive("D1", close(legs=2), 2.0)
    assert orders(producer, Release) == [Release("t", Ending.DONE, "")]


def test_a_layout_that_cannot_be_mapped_is_the_cause_that_the_consumer_is_told():
    producer = make_producer()
    producer.open("t", 0.0)
    (first, *_) = answers(producer, granted(), "stranger")
    assert (first.state, first.cause) == (State.FAILED, "blocks of 3 tokens here, of 4 there")


def test_a_leg_that_failed_is_said_to_have_until_the_consumer_knows_and_then_nothing_more_is_said():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
    producer.cancel("t", "abort", 0.1)
    producer.take()
    said = []
    for now_s in (0.5, 1.0, 1.5, 2.0, 2.5):
        producer.tick(now_s)
        said += [(now_s, order.message.state) for order in orders(producer, Send)]
    assert said == [(at_s, State.FAILED) for at_s in (0.5, 1.5, 2.5)]
    (answer,) = answers(producer, close(done=False))
    assert answer.state is State.CLOSED
    (answer,) = answers(producer, close(done=False, grant=2))
    assert (answer.state, answer.grant) == (State.CLOSED, 2)
    for now_s in range(3, 40):
        producer.tick(float(now_s))
    assert orders(producer, Send) == []


@pytest.mark.parametrize("granted_first", [True, False])
def test_more_tokens_than_were_computed_are_not_waited_for(granted_first):
    producer = make_producer()
    producer.open("t", 0.0)
    if granted_first:
        producer.receive("D0", granted(stop_token=9), 0.0)
        producer.take()
    producer.finished("t", 8, 1.0)
    if not granted_first:
        producer.receive("D0", granted(stop_token=9), 1.0)
    message = orders(producer, Send)[0].message
    assert message.state is State.FAILED and "fewer tokens" in message.cause


def test_a_rank_that_is_through_gets_nothing_more_while_others_do():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(legs=2), 0.0)
    producer.receive("D1", granted(legs=2), 0.0)
    producer.receive("D0", close(legs=2, done=False), 0.5)
    producer.finished("t", 8, 1.0)
    assert [write.peer for write in orders(producer, Write)] == ["D1"]


def test_a_silent_rank_is_given_up_though_another_is_heard_and_prefill_goes_on():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(legs=2), 0.0)
    for now_s in range(0, 30, 5):
        producer.receive("D1", granted(legs=2), float(now_s))
    producer.tick(29.9)
    assert State.FAILED not in [order.message.state for order in orders(producer, Send)]
    producer.tick(30.0)
    failed = [order.peer for order in orders(producer, Send) if order.message.state is State.FAILED]
    assert failed == ["D0"] and producer.held == ["t"]
    producer.tick(40.0)
    assert {order.peer for order in orders(producer, Send)} == {"D1"}  # nobody listens at D0


def test_blocks_for_a_consumer_that_restarted_are_released_when_its_new_life_is_met():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", announce(), 0.0)
    producer.met("D0", 21, 1.0)
    assert orders(producer, Release) == [Release("t", Ending.FAILED, "the consumer restarted")]


def test_a_late_grant_gets_at_once_all_that_was_computed():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.computed("t", 1, 4, 0.0)
    producer.computed("t", 0, 8, 0.0)
    producer.receive("D0", granted(), 1.0)
    assert [write.batch for write in orders(producer, Write)] == [Batch(0, 2, 0, 4), Batch(0, 1, 4, 8)]


def test_a_second_grant_for_one_transfer_is_refused_and_the_first_goes_on():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
    (message,) = answers(producer, granted(grant=2))
    assert (message.state, message.grant) == (State.FAILED, 2)
    producer.finished("t", 8, 1.0)
    assert [write.granted.grant for write in orders(producer, Write)] == [1]


@pytest.mark.parametrize("message", [report(grant=2, again=[0]), report(again=[1]), close(grant=2)])
def test_a_report_or_close_of_another_grant_or_batch_changes_nothing(message):
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
    producer.finished("t", 8, 1.0)
    producer.written("D0", "t", 0, [1], None, 1.0)
    producer.take()
    producer.receive("D0", message, 2.0)
    assert orders(producer, Write, Release) == []


def test_a_batch_is_written_again_once_however_often_that_is_asked():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
    producer.finished("t", 8, 1.0)
    producer.receive("D0", report(again=[0]), 1.5)  # still being written
    producer.written("D0", "t", 0, [1], None, 1.0)
    producer.take()
    for _ in range(3):
        producer.receive("D0", report(again=[0]), 2.0)
    producer.written("D0", "t", 0, [1], None, 3.0)
    producer.receive("D0", report(again=[0]), 4.0)
    assert [(write.number, write.attempt) for write in orders(producer, Write)] == [(0, 1)]


def test_writes_under_way_are_abandoned_when_the_consumer_closes():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
    producer.finished("t", 8, 1.0)
    producer.receive("D0", close(done=False), 2.0)
    given = producer.take()
    assert Abandon("D0", "t") in given and not any(isinstance(order, Release) for order in given)
    producer.written("D0", "t", 0, [], "cancelled", 3.0)
    assert orders(producer, Release) == [Release("t", Ending.CANCELLED, "")]


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
    producer = make_producer()
    producer.open("t", 0.0)
    producer.receive("D0", granted(), 0.0)
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


def test_calls_that_cannot_be_meant_are_errors():
    producer = make_producer()
    producer.open("t", 0.0)
    producer.finished("t", 8, 0.0)
    for wrong in (
        lambda: producer.open("t", 0.0),
        lambda: producer.finished("t", 8, 0.0),
        lambda: producer.computed("other", 0, 8, 0.0),
        lambda: producer.cancel("other", "", 0.0),
    ):
        with pytest.raises(ValueError, match="transfer"):
            wrong()
    consumer = make_consumer()
    with pytest.raises(ValueError, match="granted already"):
        consumer.grant("t", 0, 8, [5], KEY, 0.0)
    with pytest.raises(ValueError, match="under way"):
        consumer.announce("t", [Source("P0", 10, LAYERS, 1)], 0.0, computed=True)
    with pytest.raises(ValueError, match="no sources"):
        consumer.announce("other", [], 0.0, computed=True)


# The consumer


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
    assert Revoke("t") in given and not any(isinstance(order, Verify) for order in given)


def test_batches_that_overlap_do_not_make_a_transfer_complete():
    consumer = make_consumer()
    parts = [landed(stop_token=6, batch=0), landed(first_token=4, stop_token=6, batch=1)]
    for part in parts:
        consumer.receive("P0", part, 1.0)
        consumer.verified("P0", "t", part, True, 1.0)
    consumer.revoked("t", 1.0)
    assert orders(consumer, Release) == [Release("t", Ending.FAILED, "batches overlap")]


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
        consumer.receive("P0", parts[number], 1.0)
        consumer.take()
        consumer.verified("P0", "t", parts[number], True, 1.0)
        verified += [order.message.verified for order in orders(consumer, Send)]
    assert verified == [1, 1, 3]


def test_one_leg_that_is_done_does_not_make_the_transfer_done():
    consumer = make_consumer(legs=2)
    consumer.receive("P0", landed(), 1.0)
    consumer.verified("P0", "t", landed(), True, 1.0)
    assert orders(consumer, Revoke) == []
    consumer.receive("P1", landed(), 1.0)
    consumer.verified("P1", "t", landed(), True, 1.0)
    assert orders(consumer, Revoke) == [Revoke("t")]


def test_the_silence_of_a_producer_counts_from_the_grant():
    consumer = Consumer(20)
    consumer.announce("t", [Source("P0", 10, LAYERS, 1)], 1000.0, computed=True)
    consumer.tick(1049.0)
    assert consumer.held == ["t"]
    consumer.grant("t", 0, 8, [5], KEY, 1050.0)
    consumer.tick(1079.9)
    assert consumer.held == ["t"] and orders(consumer, Revoke) == []
    consumer.tick(1080.0)
    assert orders(consumer, Revoke) == [Revoke("t")]


def test_a_producer_that_has_sent_all_may_fall_silent_while_others_send():
    consumer = make_consumer(legs=2)
    consumer.receive("P0", landed(), 1.0)
    consumer.verified("P0", "t", landed(), True, 1.0)
    consumer.receive("P1", status(), 25.0)
    consumer.tick(40.0)
    assert orders(consumer, Revoke) == []


def test_nothing_is_read_from_a_transfer_that_has_no_grant():
    consumer = Consumer(20)
    consumer.announce("t", [Source("P0", 10, LAYERS, 1)], 0.0, computed=True)
    consumer.receive("P0", landed(grant=0), 1.0)
    assert orders(consumer, Verify, Release) == []


@pytest.mark.parametrize("message", [landed(transfer="gone"), status(transfer="gone"), landed(grant=7)])
def test_a_producer_that_serves_what_is_not_wanted_is_told_to_stop(message):
    (answer,) = answers(make_consumer(), message, "P0")
    assert isinstance(answer, Close) and not answer.done and answer.grant == message.grant


def test_what_is_over_on_both_sides_is_not_spoken_of():
    assert answers(make_consumer(), status(transfer="gone", state=State.CLOSED), "P0") == []


def test_a_producer_that_thinks_it_is_over_ends_the_transfer():
    consumer = make_consumer()
    consumer.receive("P0", status(state=State.CLOSED), 1.0)
    consumer.revoked("t", 1.0)
    assert orders(consumer, Release) == [Release("t", Ending.FAILED, "the producer gave up: closed")]


def test_what_lands_after_the_end_is_not_read():
    consumer = make_consumer()
    consumer.cancel("t", "client gone", 1.0)
    consumer.take()
    consumer.receive("P0", landed(), 1.0)
    assert orders(consumer, Verify) == []


def test_a_revocation_that_nobody_ordered_changes_nothing():
    consumer = make_consumer()
    consumer.revoked("t", 1.0)
    assert consumer.take() == []


def test_the_life_of_a_producer_that_answers_first_is_the_one_that_counts():
    consumer = Consumer(20)
    consumer.announce("t", [Source("P0", 0, LAYERS, 1)], 0.0, computed=False)
    consumer.grant("t", 0, 8, [5], KEY, 0.0)
    consumer.receive("P0", status(), 1.0)
    assert orders(consumer, Revoke) == []
    consumer.met("P0", 11, 2.0)
    assert orders(consumer, Revoke) == [Revoke("t")]


def test_wrong_bytes_are_not_checked_again_until_they_came_again():
    consumer = make_consumer()
    consumer.receive("P0", landed(), 1.0)
    consumer.verified("P0", "t", landed(), False, 1.0)
    consumer.take()
    consumer.receive("P0", landed(), 1.1)
    assert orders(consumer, Verify) == []
    consumer.receive("P0", landed(attempt=1), 1.2)
    assert len(orders(consumer, Verify)) == 1


def test_what_is_asked_for_again_is_asked_each_second_until_it_comes():
    consumer = make_consumer()
    consumer.receive("P0", landed(), 1.0)
    consumer.verified("P0", "t", landed(), False, 1.0)
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
    consumer.announce("t", [Source("P0", 10, LAYERS, 1)], 2.0, computed=True)
    consumer.grant("t", 0, 8, [6], KEY, 2.0)
    consumer.take()
    consumer.verified("P0", "t", landed(), True, 2.0)
    assert consumer.take() == []


def test_messages_meant_for_the_other_half_do_nothing():
    producer, consumer = make_producer(), make_consumer()
    assert answers(producer, status(to=10, generation=20)) == []
    assert answers(consumer, close(to=20, generation=10), "P0") == []


def test_a_close_is_repeated_until_it_is_known_and_for_one_lease_at_most():
    for confirmed in (True, False):
        consumer = make_consumer()
        consumer.cancel("t", "client gone", 1.0)
        consumer.revoked("t", 1.0)
        consumer.take()
        if confirmed:
            consumer.receive("P0", status(state=State.CLOSED), 1.5)
        times = [now_s for now_s in range(2, 100) if consumer.tick(now_s) is not None or orders(consumer, Send)]
        assert times == ([] if confirmed else list(range(2, 2 + int(Timing().lease_s))))


# Anything at all

few = st.integers(0, 3)
head = {
    "generation": st.sampled_from([19, 20, 21]),
    "to": st.sampled_from([0, 10, 10, 10, 9]),
    "transfer": st.sampled_from(["t", "t", "u"]),
    "grant": few,
}
to_producer = st.one_of(
    st.builds(announce, **head, legs=few, computed=st.booleans()),
    st.builds(
        granted, **head, legs=few, computed=st.booleans(), first_token=st.sampled_from([0, 2, 4]), stop_token=few
    ),
    st.builds(granted, **head),
    st.builds(report, **head, verified=few, again=st.lists(few)),
    st.builds(close, **head, legs=few, done=st.booleans()),
    st.builds(Reset, generation=head["generation"], to=head["to"], transfer=head["transfer"]),
)
peers = st.sampled_from(["D0", "D1", "stranger"])
calls = st.sampled_from(["open", "computed", "finished", "cancel", "tick", "lease"])


@settings(max_examples=300)
@given(st.lists(st.one_of(st.tuples(peers, to_producer), calls), max_size=40), st.booleans())
def test_no_message_makes_a_producer_raise_release_twice_or_hold_for_ever(steps, works):
    producer, now_s = make_producer(), 0.0
    opened, finished, released = Counter(), set(), Counter()

    def obey() -> None:
        while given := producer.take():
            for order in given:
                if isinstance(order, Write):
                    producer.written(order.peer, order.transfer, order.number, [1], None if works else "broken", now_s)
                elif isinstance(order, Release):
                    released[order.transfer] += 1

    for step in steps:
        now_s += 0.5
        held = producer.held
        if step == "open" and "t" not in producer._transfers:
            producer.open("t", now_s)
            opened["t"] += 1
        elif step == "computed" and "t" in held:
            producer.computed("t", 0, 4, now_s)
        elif step == "finished" and "t" in held and "t" not in finished:
            producer.finished("t", 8, now_s)
            finished.add("t")
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
    "generation": st.sampled_from([9, 10, 10, 10, 11]),
    "to": st.sampled_from([0, 20, 20, 20, 19]),
    "transfer": st.sampled_from(["t", "t", "t", "u"]),
    "grant": st.sampled_from([0, 1, 1, 2]),
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
    st.builds(
        Reset, generation=from_producer["generation"], to=from_producer["to"], transfer=from_producer["transfer"]
    ),
)


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(st.tuples(st.sampled_from(["P0", "P1"]), to_consumer), st.sampled_from(["grant", "tick"])),
        max_size=40,
    ),
    st.lists(st.booleans(), min_size=1),
)
def test_no_message_makes_a_consumer_raise_end_twice_or_call_done_what_is_not_there(steps, rights):
    consumer, now_s, checks = Consumer(20), 0.0, 0
    consumer.announce("t", [Source("P0", 10, LAYERS, 1)], 0.0, computed=True)
    right_cells: Counter[tuple[int, int]] = Counter()
    endings: list[Ending] = []

    def obey() -> None:
        nonlocal checks
        while given := consumer.take():
            for order in given:
                if isinstance(order, Verify):
                    checks += 1
                    right = rights[checks % len(rights)]
                    part = order.landed
                    if right:
                        right_cells.update(
                            (layer, token)
                            for layer in range(part.first_layer, part.first_layer + part.num_layers)
                            for token in range(part.first_token, part.stop_token)
                        )
                    consumer.verified(order.peer, order.transfer, part, right, now_s)
                elif isinstance(order, Revoke):
                    consumer.revoked(order.transfer, now_s)
                elif isinstance(order, Release):
                    endings.append(order.ending)

    for step in steps:
        now_s += 0.5
        if step == "grant" and not consumer._grants:
            consumer.grant("t", 0, 8, [5], KEY, now_s)
        elif step == "tick":
            consumer.tick(now_s)
        elif isinstance(step, tuple):
            consumer.receive(*step, now_s)
        obey()
    consumer.tick(now_s + 200.0)
    obey()
    assert len(endings) == 1
    if endings == [Ending.DONE]:
        assert right_cells == Counter({(layer, token): 1 for layer in LAYERS for token in range(8)})
    consumer.tick(now_s + 300.0)
    assert consumer.tick(now_s + 300.0) is None
