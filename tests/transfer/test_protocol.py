"""The PD protocol, both halves, in a simulated world that loses, doubles and delays messages and kills ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.network import DOUBLE, DROP, LAYERS, TIMING, TOKENS, Fault, Faults, World

from transfer.granularity import Granularity
from transfer.protocol import Ending

ALL = range(LAYERS)
NONE = range(0)
ONE_TO_ONE = [{0: ALL}]
TOPOLOGIES = {
    "1P1D": ONE_TO_ONE,
    "pipeline to one": [{0: range(2), 1: range(2, 4)}],
    "one to two": [{0: ALL}, {0: ALL}],
    "two to two": [{0: range(2), 1: range(2, 4)}, {0: range(2), 1: range(2, 4)}],
    "an idle source": [{0: ALL, 1: NONE}],
    "idle for one": [{0: ALL, 2: NONE}, {1: ALL}],
}
ORDERS = ("sequential", "grant first", "grant meanwhile", "unknown lives")
LATE = Fault((1.7,))
VERY_LATE = Fault((40.0,))


def begin(world: World, order: str, transfer: str = "t", at_s: float = 1.0) -> float:
    """Both sides of one request; returns when the consumer granted."""
    if order == "grant first":
        world.fetch(transfer, at_s, at_s + 0.1, computed=False)
        world.open(transfer, at_s + 0.5, chunks=(10, TOKENS))
        return at_s + 0.1
    through_s = world.open(transfer, at_s, chunks=(10, TOKENS))
    if order == "grant meanwhile":
        world.fetch(transfer, at_s + 0.1, at_s + 0.3, computed=False)
        return at_s + 0.3
    world.fetch(transfer, through_s + 1.0, through_s + 3.0, computed=True, known=order != "unknown lives")
    return through_s + 3.0


def everywhere(world: World, ending: Ending) -> dict[str, Ending]:
    return dict.fromkeys(world.ranks, ending)


@pytest.mark.parametrize("granularity", Granularity)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("order", ORDERS)
def test_without_faults_everything_is_done_everywhere_and_soon(order, topology, granularity):
    world = World(TOPOLOGIES[topology], granularity=granularity)
    granted_s = begin(world, order)
    world.run()
    world.check()
    assert world.endings("t") == everywhere(world, Ending.DONE)
    assert max(at_s for rank in world.ranks.values() for _, _, at_s in rank.released.values()) < granted_s + 2.0


@pytest.mark.parametrize("fault", [DROP, DOUBLE, LATE, VERY_LATE], ids=["lost", "doubled", "late", "very late"])
@pytest.mark.parametrize("topology", ["1P1D", "two to two", "idle for one"])
@pytest.mark.parametrize("order", ORDERS)
def test_any_one_message_may_be_lost_doubled_or_late(order, topology, fault):
    number, count = 0, 1
    while number < count:
        world = World(TOPOLOGIES[topology], Faults(messages={number: fault}))
        begin(world, order)
        world.run(300.0)
        count = world.messages
        world.check()
        assert world.endings("t") == everywhere(world, Ending.DONE), "\n".join(world.log)
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
        world.check()
        assert world.endings("t") == everywhere(world, Ending.DONE), "\n".join(world.log)


message_faults = st.dictionaries(
    st.integers(0, 60),
    st.builds(Fault, st.lists(st.sampled_from([0.0, 0.005, 0.3, 1.7, 6.0, 40.0]), max_size=3).map(tuple)),
    max_size=25,
)


@settings(max_examples=150)
@given(st.sampled_from(sorted(TOPOLOGIES)), st.sampled_from(ORDERS), st.sampled_from(Granularity), message_faults)
def test_a_network_that_gets_well_again_costs_no_transfer(topology, order, granularity, messages):
    world = World(TOPOLOGIES[topology], Faults(messages=messages), granularity)
    begin(world, order)
    world.run()
    world.check()
    assert world.endings("t") == everywhere(world, Ending.DONE), "\n".join(world.log)


moments = st.floats(0.0, 60.0).map(lambda at_s: round(at_s, 2))
names = st.sampled_from(["P0", "P1", "D0", "D1"])


@settings(max_examples=300)
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
    crashes=st.lists(st.tuples(names, moments), max_size=3),
    cancels=st.lists(st.tuples(names, moments), max_size=2),
)
def test_whatever_happens_every_transfer_has_one_ending_and_no_block_is_held_for_ever(
    topology, orders, granularity, messages, cuts, failed, wrong, slow, revoke_s, crashes, cancels
):
    faults = Faults(messages, [(start, start + length) for start, length in cuts], failed, wrong, slow, revoke_s)
    world = World(TOPOLOGIES[topology], faults, granularity)
    for number, order in enumerate(orders):
        begin(world, order, f"t{number}", 1.0 + number)
    for name, at_s in crashes:
        if name in world.ranks:
            world.crash(name, at_s)
    for name, at_s in cancels:
        if name in world.ranks:
            world.cancel(name, "t0", at_s)
    world.run()
    world.check()


# One thing at a time


def run(faults: Faults | None = None, order: str = "sequential", **options: object) -> World:
    world = World(ONE_TO_ONE, faults, **options)
    begin(world, order)
    world.run()
    world.check()
    return world


def released_s(world: World, name: str, transfer: str = "t") -> float:
    return world.ranks[name].released[transfer][2]


def cause(world: World, name: str) -> str:
    return world.ranks[name].released["t"][1]


def test_wrong_bytes_are_sent_once_more():
    world = run(Faults(wrong_writes={0}))
    assert world.endings("t") == everywhere(world, Ending.DONE)
    assert world.writes == run().writes + 1


def test_bytes_that_are_wrong_twice_fail_the_transfer_on_both_sides():
    world = run(Faults(wrong_writes={0, 1}), granularity=Granularity.FULL)
    assert world.endings("t") == {"D0": Ending.FAILED, "P0": Ending.CANCELLED}
    assert "wrong bytes twice" in cause(world, "D0")
    assert world.writes == 2


def test_a_failed_write_fails_the_transfer_with_its_cause():
    world = run(Faults(failed_writes={0}))
    assert world.endings("t") == everywhere(world, Ending.FAILED)
    assert "connection lost" in cause(world, "D0") and "connection lost" in cause(world, "P0")


def test_a_finished_prefill_that_nobody_asks_for_is_held_for_one_lease():
    world = World(ONE_TO_ONE)
    through_s = world.open("t", 1.0)
    world.run()
    world.check()
    assert world.endings("t") == {"P0": Ending.EXPIRED}
    assert through_s + TIMING.lease_s <= released_s(world, "P0") <= through_s + TIMING.lease_s + TIMING.retry_s


def test_heartbeats_of_a_consumer_that_waits_for_blocks_renew_the_lease():
    world = World(ONE_TO_ONE)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.0 + 3 * TIMING.lease_s, computed=True)
    world.run()
    world.check()
    assert world.endings("t") == everywhere(world, Ending.DONE)


def test_no_heartbeat_holds_blocks_beyond_the_limit():
    timing = replace(TIMING, hold_s=70.0, deadline_s=10_000.0)
    world = World(ONE_TO_ONE, timing=timing)
    through_s = world.open("t", 1.0)
    world.fetch("t", 2.0, 5000.0, computed=True)
    world.run()
    world.check()
    assert world.endings("t") == {"P0": Ending.EXPIRED, "D0": Ending.FAILED}
    assert through_s + 70.0 <= released_s(world, "P0") <= through_s + 70.0 + TIMING.retry_s
    assert released_s(world, "D0") <= released_s(world, "P0") + 1.0


def test_a_consumer_gives_up_at_its_deadline_where_prefill_never_comes():
    world = World(ONE_TO_ONE)
    world.fetch("t", 1.0, 2.0, computed=False)
    world.run()
    world.check()
    assert world.endings("t") == {"D0": Ending.EXPIRED}
    assert 1.0 + TIMING.deadline_s <= released_s(world, "D0") <= 1.0 + TIMING.deadline_s + TIMING.retry_s


def test_a_transfer_that_the_producer_should_know_and_does_not_fails_at_once():
    world = World(ONE_TO_ONE)
    world.fetch("t", 1.0, 2.0, computed=True)
    world.run()
    world.check()
    assert world.endings("t") == {"D0": Ending.FAILED} and "not known" in cause(world, "D0")
    assert released_s(world, "D0") < 1.1


@pytest.mark.parametrize("at_s", [0.5, 1.05, 1.2, 1.45, 1.6, 2.0])
@pytest.mark.parametrize("order", ["grant first", "grant meanwhile"])
def test_a_cancel_at_the_consumer_frees_the_producer_soon(order, at_s):
    world = World(ONE_TO_ONE)
    begin(world, order)
    world.cancel("D0", "t", at_s)
    world.run()
    world.check()
    if at_s > 1.0 and world.endings("t") != everywhere(world, Ending.DONE):
        assert world.endings("t") == everywhere(world, Ending.CANCELLED)
        assert released_s(world, "P0") <= max(at_s, 1.5) + 0.2


@pytest.mark.parametrize("at_s", [1.05, 1.2, 1.4])
def test_a_cancel_at_the_producer_fails_the_consumer_soon(at_s):
    world = World(ONE_TO_ONE)
    begin(world, "grant meanwhile")
    world.cancel("P0", "t", at_s)
    world.run()
    world.check()
    assert world.endings("t") == {"P0": Ending.CANCELLED, "D0": Ending.FAILED}
    assert released_s(world, "P0") <= at_s + 0.1 and released_s(world, "D0") <= max(at_s, 1.3) + 0.2
    assert "abort" in cause(world, "D0")


def test_a_cancelled_producer_keeps_its_blocks_while_a_write_reads_them():
    world = World(ONE_TO_ONE, Faults(write_s={0: 8.0}))
    begin(world, "grant first")
    world.cancel("P0", "t", 2.0)
    world.run()
    world.check()
    assert 9.0 < released_s(world, "P0") < 10.0


def test_a_consumer_keeps_its_blocks_until_nothing_can_write_to_them():
    world = World(ONE_TO_ONE, Faults(revoke_s=7.0, write_s={0: 5.0}))
    begin(world, "grant first")
    world.cancel("D0", "t", 2.0)
    world.run()
    world.check()
    assert released_s(world, "D0") == pytest.approx(9.0)


@pytest.mark.parametrize("order", ["sequential", "grant meanwhile", "unknown lives"])
def test_a_producer_that_restarts_fails_its_transfers_within_a_heartbeat(order):
    faults = Faults(write_s=dict.fromkeys(range(100), 20.0))
    world = World(ONE_TO_ONE, faults)
    crash_s = begin(world, order) + 1.0
    world.crash("P0", crash_s)
    world.run()
    world.check()
    assert world.endings("t") == {"D0": Ending.FAILED}
    assert released_s(world, "D0") <= crash_s + TIMING.heartbeat_s + 1.0


def test_a_consumer_that_restarts_frees_the_producer_soon():
    world = World(ONE_TO_ONE)
    through_s = world.open("t", 1.0)
    world.fetch("t", 2.0, 30.0, computed=True)
    world.crash("D0", 4.0)
    world.fetch("other", 5.0, 5.1, computed=False)
    world.run()
    world.check()
    assert world.endings("t") == {"P0": Ending.FAILED} and "restarted" in cause(world, "P0")
    assert through_s < released_s(world, "P0") < 6.0


def test_a_new_life_of_the_consumer_is_not_given_what_the_earlier_one_began():
    world = World(ONE_TO_ONE, Faults(write_s=dict.fromkeys(range(100), 3.0)))
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.1, computed=True)
    world.crash("D0", 3.0)
    world.fetch("t", 4.0, 4.1, computed=True)
    world.run()
    world.check()
    assert world.endings("t") == everywhere(world, Ending.FAILED)
    assert released_s(world, "D0") < 5.0


def test_a_silent_producer_is_given_up_after_a_lease():
    world = World(ONE_TO_ONE, Faults(cuts=[(1.35, 10_000.0)]))
    begin(world, "grant meanwhile")
    world.run()
    world.check()
    assert world.endings("t") == {"D0": Ending.FAILED, "P0": Ending.EXPIRED}
    assert 1.3 + TIMING.lease_s <= released_s(world, "D0") <= 1.35 + TIMING.lease_s + TIMING.retry_s


def test_what_the_consumer_has_already_does_not_travel():
    world = World(ONE_TO_ONE, granularity=Granularity.FULL)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.1, computed=True, first_token=16)
    world.run()
    world.check(first_token=16)
    assert world.endings("t") == everywhere(world, Ending.DONE)
    assert {at[3] for at in world.ranks["D0"].memory} == set(range(16, TOKENS))


@pytest.mark.parametrize("first_token, ending", [(2, Ending.FAILED), (TOKENS, Ending.DONE)])
def test_tokens_that_cut_what_moves_together_are_refused_and_nothing_to_move_is_done(first_token, ending):
    world = World(ONE_TO_ONE)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.1, computed=True, first_token=first_token)
    world.run()
    world.check(first_token=first_token)
    assert world.endings("t") == everywhere(world, ending)
    assert world.writes == 0
