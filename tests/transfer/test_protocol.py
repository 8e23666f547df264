"""The PD protocol, both sides, in a simulated world that loses, doubles and delays messages and kills ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples, sampled
from simulated.invariants import check, endings
from simulated.network import DOUBLE, DROP, TOKENS, Fault, Faults, World
from simulated.requests import ONE_TO_ONE, ORDERS, TOPOLOGIES, begin, everywhere

from transfer.plan.granularity import Granularity
from transfer.protocol.orders import Ending

LATE = Fault((1.7,))
VERY_LATE = Fault((40.0,))


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("order", ORDERS)
def test_without_faults_everything_is_done_everywhere_and_soon(order, topology, granularity):
    world = World(TOPOLOGIES[topology], granularity=granularity)
    granted_s = begin(world, order)
    world.run()
    check(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE)
    assert max(at_s for rank in world.ranks.values() for _, _, at_s in rank.released.values()) < granted_s + 2.0


@pytest.mark.long
@pytest.mark.parametrize(
    "order, topology, fault",
    sampled(ORDERS, ["1P1D", "two to two", "idle for one"], [DROP, DOUBLE, LATE, VERY_LATE]),
)
def test_any_one_message_may_be_lost_doubled_or_late(order, topology, fault):
    number, count = 0, 1
    while number < count:
        world = World(TOPOLOGIES[topology], Faults(messages={number: fault}))
        begin(world, order)
        world.run(300.0)
        count = world.messages
        check(world)
        assert endings(world, "t") == everywhere(world, Ending.DONE), "\n".join(world.log)
        number += 1
    assert count >= 8


@pytest.mark.slow
@pytest.mark.parametrize("faults", [(DROP, DROP), (DROP, DOUBLE), (DOUBLE, VERY_LATE), (DROP, LATE), (LATE, VERY_LATE)])
@pytest.mark.parametrize("order", ORDERS)
def test_any_two_messages_may_be_lost_doubled_or_late(order, faults):
    world = World(ONE_TO_ONE)
    begin(world, order)
    world.run(300.0)
    for pair in combinations(range(world.messages + 2), 2):
        world = World(ONE_TO_ONE, Faults(messages=dict(zip(pair, faults, strict=True))))
        begin(world, order)
        world.run(300.0)
        check(world)
        assert endings(world, "t") == everywhere(world, Ending.DONE), "\n".join(world.log)


message_faults = st.dictionaries(
    st.integers(0, 60),
    st.builds(Fault, st.lists(st.sampled_from([0.0, 0.005, 0.3, 1.7, 6.0, 40.0]), max_size=3).map(tuple)),
    max_size=25,
)


@settings(max_examples=examples(150))
@given(st.sampled_from(sorted(TOPOLOGIES)), st.sampled_from(ORDERS), st.sampled_from(Granularity), message_faults)
def test_a_network_that_gets_well_again_costs_no_transfer(topology, order, granularity, messages):
    world = World(TOPOLOGIES[topology], Faults(messages=messages), granularity)
    begin(world, order)
    world.run()
    check(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE), "\n".join(world.log)


moments = st.floats(0.0, 60.0).map(lambda at_s: round(at_s, 2))
names = st.sampled_from(["P0", "P1", "D0", "D1"])


@settings(max_examples=examples(300))
@given(
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    orders=st.lists(st.sampled_from(ORDERS), min_size=1, max_size=3),
    granularity=st.sampled_from(Granularity),
    messages=message_faults,
    cuts=st.lists(st.tuples(moments, st.sampled_from([1.0, 20.0, 40.0, 400.0])), max_size=2),
    failed=st.sets(st.integers(0, 30), max_size=2),
    wrong=st.sets(st.integers(0, 30), max_size=3),
    slow=st.dictionaries(st.integers(0, 30), st.sampled_from([0.5, 8.0, 50.0]), max_size=4),
    revoke_s=st.sampled_from([0.0, 0.02, 5.0]),
    crashes=st.lists(st.tuples(names, moments, st.sampled_from([0.0, 0.0, 3.0, 50.0, None])), max_size=3),
    losses=st.lists(st.tuples(names, moments), max_size=3),
    cancels=st.lists(st.tuples(names, moments), max_size=2),
    preemptions=st.lists(st.floats(1.0, 6.0), max_size=2),
)
def test_whatever_happens_every_transfer_has_one_ending_and_no_block_is_held_for_ever(
    topology, orders, granularity, messages, cuts, failed, wrong, slow, revoke_s, crashes, losses, cancels, preemptions
):
    faults = Faults(messages, [(start, start + length) for start, length in cuts], failed, wrong, slow, revoke_s)
    world = World(TOPOLOGIES[topology], faults, granularity)
    for number, order in enumerate(orders):
        begin(world, order, f"t{number}", 1.0 + number)
    for name, at_s, back_s in crashes:
        if name in world.ranks:
            world.crash(name, at_s, back_s=back_s)
            if name in world.producers:
                world.lose(name, at_s + 0.5)
    for name, at_s in losses:
        if name in world.producers:
            world.lose(name, at_s)
    for at_s in preemptions:
        world.preempt("t0", at_s, chunks=(10, TOKENS))
    for name, at_s in cancels:
        if name in world.ranks:
            world.cancel(name, "t0", at_s)
    world.run()
    check(world)
