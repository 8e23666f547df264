"""One name for two requests: each gets the KV of its own prompt, or none, whoever asks and when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples
from simulated.again import Attempt, Engines
from simulated.invariants import check, endings
from simulated.network import Fault, Faults, World
from simulated.requests import ONE_TO_ONE, TOPOLOGIES
from simulated.sides import (
    Prompt,
    announce,
    answers,
    close,
    ended,
    granted,
    make_consumer,
    make_producer,
    no_prompt,
    orders,
    own_prompt,
    status,
)

from transfer.plan.granularity import Granularity
from transfer.protocol.messages import Announce, Close, Granted, Report, State
from transfer.protocol.orders import Ending, Send, Write
from transfer.protocol.outgoing import Outgoing
from transfer.protocol.producer import Producer

MINE, OTHER = own_prompt("mine"), own_prompt("other")
NAMED = "must be new for each request"


def opened(prompt: bytes = MINE) -> tuple[Producer, Outgoing]:
    producer, transfer = make_producer(), Outgoing("t", "t", prompt)
    Producer.open(producer, transfer, 0.0)
    return producer, transfer


@pytest.mark.parametrize("message", [announce, granted])
def test_a_consumer_that_wants_another_prompt_is_refused(message):
    producer, transfer = opened()
    (answer,) = answers(producer, message(prompt=OTHER))
    assert (answer.state, answer.number) == (State.FAILED, 1) and NAMED in answer.cause
    assert not transfer.sessions and orders(producer, Write) == []


def test_its_close_ends_nothing_and_is_answered():
    producer, transfer = opened()
    (answer,) = answers(producer, close(prompt=OTHER))
    assert answer.state is State.CLOSED
    Producer.finished(producer, transfer, 8, 1.0)
    assert ended(producer) == []
    (answer,) = answers(producer, close(prompt=MINE), "D1")
    assert answer.state is State.CLOSED and transfer.ending is Ending.DONE


@pytest.mark.parametrize(("here", "there"), [(MINE, MINE), (MINE, b""), (b"", OTHER), (b"", b"")])
def test_where_one_side_knows_no_prompt_nothing_is_compared(here, there):
    producer, _ = opened(here)
    assert {answer.state for answer in answers(producer, granted(prompt=there))} == {State.OPEN}


def test_who_asked_before_the_engine_named_it_is_compared_then():
    producer = make_producer()
    producer.receive("D0", granted(prompt=OTHER), 0.0)
    producer.receive("D1", granted(prompt=MINE, destinations=1), 0.0)
    producer.receive("D2", close(prompt=OTHER, destinations=3), 0.0)
    producer.take()
    transfer = Outgoing("t", "t", MINE)
    Producer.open(producer, transfer, 1.0)
    ((refused, message),) = [(order.peer, order.message) for order in orders(producer, Send)]
    assert (refused, message.state) == ("D0", State.FAILED) and NAMED in message.cause
    Producer.finished(producer, transfer, 8, 2.0)
    assert {order.peer for order in orders(producer, Write)} == {"D1"}
    Producer.written(producer, "D1", transfer, 0, [1], None, 3.0)
    producer.receive("D1", close(prompt=MINE), 3.0)
    assert ended(producer) == [("t", Ending.DONE, "")]


def test_everything_that_a_consumer_says_has_the_prompt():
    consumer = make_consumer(has_grant=False, prompt=MINE)
    consumer.tick(5.0)
    assert consumer.grant("t", 0, 8, [5], b"k" * 16, 5.0)
    consumer.receive("P0", status(), 5.5)
    consumer.tick(7.0)
    consumer.cancel("t", "client gone", 8.0)
    said = [order.message for order in orders(consumer, Send)]
    assert {type(message) for message in said} == {Announce, Granted, Report, Close}
    assert {message.prompt for message in said} == {MINE}


@pytest.mark.parametrize("late", ["D0", "D1"])
@pytest.mark.parametrize("open_s", [0.5, 1.0, 3.0])
def test_of_two_decode_instances_only_the_one_that_has_the_prompt_gets_the_kv(open_s, late):
    world = World(TOPOLOGIES["one to two"], prompt=own_prompt, apart=True)
    world.open("t/1", open_s)
    for number, name in enumerate(world.consumers):
        asked_s = 1.5 if name == late else 1.0
        world.call(asked_s, name, world._announce, f"t/{number + 1}", number, False)
        world.call(asked_s + 0.2, name, world._grant, f"t/{number + 1}", 0)
    world.run()
    check(world)
    assert endings(world, "t/1") == {"P0": Ending.DONE, "D0": Ending.DONE}
    assert endings(world, "t/2") == {"D1": Ending.FAILED} and NAMED in world.ranks["D1"].released["t/2"][1]


def test_what_was_forgotten_behind_a_cut_does_not_pass_on_its_kv():
    def make(prompt: Prompt) -> World:
        world = World(ONE_TO_ONE, Faults(cuts=[(0.0, 66.0)]), prompt=prompt)
        world.open("t/1", 1.0, step_s=20.0)
        world.fetch("t/1", 1.1, 1.15, computed=False)
        world.fetch("t/2", 70.0, 70.1, computed=False)
        world.run()
        return world

    with pytest.raises(AssertionError, match="without all of it"):
        check(make(no_prompt))
    world = make(own_prompt)
    check(world)
    assert endings(world, "t/2") == {"D0": Ending.FAILED} and NAMED in world.ranks["D0"].released["t/2"][1]


waits = st.sampled_from([0.0, 0.05, 0.2, 1.0, 5.0, 20.0, 40.0])
attempts = st.builds(
    Attempt,
    waits,
    waits,
    waits,
    st.sampled_from([0.01, 0.1, 2.0]),
    st.lists(st.tuples(st.sampled_from(["P0", "P1", "D0", "D1"]), waits), max_size=2).map(tuple),
)
faults = st.builds(Fault, st.lists(st.sampled_from([0.0, 0.005, 0.3, 1.7, 6.0, 25.0, 40.0]), max_size=3).map(tuple))


@settings(max_examples=examples(100))
@given(
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    apart=st.booleans(),
    granularity=st.sampled_from(Granularity),
    plan=st.lists(attempts, min_size=2, max_size=4),
    messages=st.dictionaries(st.integers(0, 80), faults, max_size=25),
    cuts=st.lists(st.tuples(st.floats(0.0, 60.0), st.sampled_from([1.0, 20.0, 40.0, 80.0])), max_size=2),
    revoke_s=st.sampled_from([0.0, 0.02, 5.0]),
)
def test_whatever_engines_do_with_a_name_none_gets_the_kv_of_another_prompt(
    topology, apart, granularity, plan, messages, cuts, revoke_s
):
    conditions = Faults(messages, [(start, start + length) for start, length in cuts], revoke_s=revoke_s)
    world = World(TOPOLOGIES[topology], conditions, granularity, prompt=own_prompt, apart=apart)
    Engines(world, plan, heedless=True)
    world.run()
    check(world, most_messages=20_000)
