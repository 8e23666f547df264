"""One name for one request after the other: each gets its own KV, and nothing late of an earlier one reaches it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_form import examples
from simulated.again import Attempt, Engines
from simulated.invariants import check, endings
from simulated.network import DOUBLE, DROP, Fault, Faults, World
from simulated.requests import TOPOLOGIES, everywhere

from transfer.plan.granularity import Granularity
from transfer.protocol.orders import Ending


@pytest.mark.parametrize("attempt", [Attempt(), Attempt(open_s=2.0), Attempt(announce_s=2.0, grant_s=1.0)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_is_done_and_soon_where_the_one_before_was_done(topology, attempt):
    world = World(TOPOLOGIES[topology])
    requests = Engines(world, [attempt] * 4).requests
    world.run(25.0)
    for request in requests:
        assert endings(world, request) == everywhere(world, Ending.DONE), "\n".join(world.log)
    world.run()
    check(world)


@pytest.mark.parametrize("cancels", [("D0", 0.3), ("D0", 0.0), ("P0", 0.12), ("P0", 0.4)])
def test_the_next_is_done_where_one_was_cancelled_after_both_had_spoken(cancels):
    world = World(TOPOLOGIES["1P1D"])
    Engines(world, [Attempt(grant_s=0.5, cancels=(cancels,)), Attempt()])
    world.run(60.0)
    assert Ending.CANCELLED in endings(world, "t/1").values()
    assert endings(world, "t/2") == everywhere(world, Ending.DONE), "\n".join(world.log)
    world.run()
    check(world)


@pytest.mark.parametrize("fault", [DROP, DOUBLE, Fault((1.7,)), Fault((0.0, 9.0)), Fault((40.0,))], ids=str)
@pytest.mark.parametrize("topology", ["1P1D", "two to two"])
def test_any_one_message_of_the_first_may_be_lost_doubled_or_late(topology, fault):
    number, count = 0, 1
    while number < count:
        world = World(TOPOLOGIES[topology], Faults(messages={number: fault}))
        Engines(world, [Attempt(), Attempt(open_s=0.2)])
        world.run(300.0)
        count = min(world.messages, 40)
        check(world)
        assert endings(world, "t/2") == everywhere(world, Ending.DONE), "\n".join(world.log)
        number += 1


def test_the_end_of_one_that_was_never_announced_is_not_taken_for_that_of_an_earlier_one():
    world = World(TOPOLOGIES["1P1D"], Faults(cuts=[(0, 40)]), Granularity.FULL)
    cancelled = Attempt(20.0, grant_s=0.0, step_s=0.01, cancels=(("D0", 0.0),))
    Engines(world, [cancelled, *[Attempt(grant_s=0.0, step_s=0.01)] * 3])
    world.run()
    check(world)
    assert endings(world, "t/2") == everywhere(world, Ending.FAILED)


waits = st.sampled_from([0.0, 0.05, 0.2, 1.0, 5.0, 20.0])
names = st.sampled_from(["P0", "P1", "D0", "D1"])
attempts = st.builds(
    Attempt,
    waits,
    waits,
    waits,
    st.sampled_from([0.01, 0.1, 2.0]),
    st.lists(st.tuples(names, waits), max_size=2).map(tuple),
)
faults = st.builds(Fault, st.lists(st.sampled_from([0.0, 0.005, 0.3, 1.7, 6.0, 25.0, 40.0]), max_size=3).map(tuple))


@settings(max_examples=examples(200))
@given(
    topology=st.sampled_from(sorted(TOPOLOGIES)),
    granularity=st.sampled_from(Granularity),
    plan=st.lists(attempts, min_size=2, max_size=4),
    messages=st.dictionaries(st.integers(0, 80), faults, max_size=25),
    cuts=st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from([1.0, 20.0, 40.0])), max_size=2),
    failed=st.sets(st.integers(0, 30), max_size=2),
    slow=st.dictionaries(st.integers(0, 30), st.sampled_from([0.5, 8.0, 50.0]), max_size=4),
    revoke_s=st.sampled_from([0.0, 0.02, 5.0]),
    crashes=st.lists(st.tuples(names, st.floats(1.0, 30.0), st.sampled_from([0.0, 3.0])), max_size=1),
)
@pytest.mark.slow
def test_whatever_happens_none_gets_the_kv_of_another(
    topology, granularity, plan, messages, cuts, failed, slow, revoke_s, crashes
):
    conditions = Faults(messages, [(start, start + length) for start, length in cuts], failed, set(), slow, revoke_s)
    world = World(TOPOLOGIES[topology], conditions, granularity)
    Engines(world, plan)
    for name, at_s, back_s in crashes:
        if name in world.ranks:
            world.crash(name, at_s, back_s=back_s)
            if name in world.producers:
                world.lose(name, at_s)
    world.run()
    check(world)
