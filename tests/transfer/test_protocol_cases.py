"""What becomes of a transfer where one thing goes wrong, and how soon: both sides in a simulated world."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated.invariants import check, endings
from simulated.network import TIMING, TOKENS, Faults, World
from simulated.requests import ONE_TO_ONE, ORDERS, TOPOLOGIES, begin, everywhere

from transfer.plan.granularity import Granularity
from transfer.protocol.orders import Ending


def over(world: World, first_token: int = 0) -> World:
    world.run()
    check(world, first_token)
    return world


def run(faults: Faults | None = None, order: str = "sequential", **options: object) -> World:
    world = World(ONE_TO_ONE, faults, **options)
    begin(world, order)
    return over(world)


def released_s(world: World, name: str, transfer: str = "t") -> float:
    """When its engine knew the ending: of what was never granted, that nothing will come."""
    rank = world.ranks[name]
    return rank.failed.get(transfer, rank.released[transfer][2])


def cause(world: World, name: str) -> str:
    return world.ranks[name].released["t"][1]


def test_wrong_bytes_are_sent_once_more():
    world = run(Faults(wrong_writes={0}))
    assert endings(world, "t") == everywhere(world, Ending.DONE)
    assert world.writes == run().writes + 1


def test_bytes_that_are_wrong_twice_fail_the_transfer_on_both_sides():
    world = run(Faults(wrong_writes={0, 1}), granularity=Granularity.FULL)
    assert endings(world, "t") == {"D0": Ending.FAILED, "P0": Ending.CANCELLED}
    assert "wrong bytes twice" in cause(world, "D0")
    assert world.writes == 2


def test_a_failed_write_fails_the_transfer_with_its_cause():
    world = run(Faults(failed_writes={0}))
    assert endings(world, "t") == everywhere(world, Ending.FAILED)
    assert "connection lost" in cause(world, "D0") and "connection lost" in cause(world, "P0")


def test_a_finished_prefill_that_nobody_asks_for_is_held_for_one_lease():
    world = World(ONE_TO_ONE)
    through_s = world.open("t", 1.0)
    over(world)
    assert endings(world, "t") == {"P0": Ending.EXPIRED}
    assert through_s + TIMING.lease_s <= released_s(world, "P0") <= through_s + TIMING.lease_s + TIMING.retry_s


def test_heartbeats_of_a_consumer_that_waits_for_blocks_renew_the_lease():
    world = World(ONE_TO_ONE)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.0 + 3 * TIMING.lease_s, computed=True)
    over(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE)


def test_no_heartbeat_holds_blocks_beyond_the_limit():
    timing = replace(TIMING, hold_s=70.0, deadline_s=10_000.0)
    world = World(ONE_TO_ONE, timing=timing)
    through_s = world.open("t", 1.0)
    world.fetch("t", 2.0, 1900.0, computed=True)
    over(world)
    assert endings(world, "t") == {"P0": Ending.EXPIRED, "D0": Ending.FAILED}
    assert through_s + 70.0 <= released_s(world, "P0") <= through_s + 70.0 + TIMING.retry_s
    assert released_s(world, "D0") <= released_s(world, "P0") + 1.0


def test_a_consumer_gives_up_at_its_deadline_where_prefill_never_comes():
    world = World(ONE_TO_ONE)
    world.fetch("t", 1.0, 2.0, computed=False)
    over(world)
    assert endings(world, "t") == {"D0": Ending.EXPIRED}
    assert 2.0 + TIMING.deadline_s <= released_s(world, "D0") <= 2.0 + TIMING.deadline_s + TIMING.retry_s


@pytest.mark.parametrize("order", ["sequential", "asked first"])
def test_a_consumer_waits_longer_for_a_prefill_that_is_known_there(order):
    world = World(ONE_TO_ONE, granularity=Granularity.FULL)
    world.fetch("t", 1.5, 1.6, computed=False)
    through_s = world.open("t", 1.0 if order == "sequential" else 50.0, step_s=60.0)
    assert 1.6 + 1.5 * TIMING.deadline_s < through_s < 1.6 + TIMING.hold_s
    over(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE)


def test_it_does_not_wait_for_ever():
    world = World(ONE_TO_ONE, granularity=Granularity.FULL)
    world.fetch("t", 1.5, 1.6, computed=False)
    world.open("t", 1.0, step_s=90.0)
    over(world)
    assert endings(world, "t") == {"P0": Ending.CANCELLED, "D0": Ending.EXPIRED}
    assert 1.6 + TIMING.hold_s <= released_s(world, "D0") <= 1.6 + TIMING.hold_s + TIMING.retry_s
    assert "prefill was not over" in cause(world, "D0")


def test_a_consumer_may_wait_for_blocks_as_long_as_the_producer_holds_its_own():
    world = World(ONE_TO_ONE)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.0 + TIMING.hold_s - 10.0, computed=True)
    over(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE)


def test_a_consumer_that_never_gets_blocks_gives_up():
    world = World(ONE_TO_ONE)
    world.fetch("t", 1.0, 1900.0, computed=False)
    over(world)
    assert endings(world, "t") == {"D0": Ending.EXPIRED} and "no blocks" in cause(world, "D0")
    assert 1.0 + TIMING.hold_s <= released_s(world, "D0") <= 1.0 + TIMING.hold_s + TIMING.retry_s


def test_a_transfer_that_goes_on_may_take_longer_than_the_deadline():
    world = World(ONE_TO_ONE)
    world.fetch("t", 1.0, 1.1, computed=False)
    through_s = world.open("t", 1.2, chunks=range(4, TOKENS + 1, 4), step_s=15.0)
    assert through_s > 1.1 + 2 * TIMING.deadline_s
    over(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE)


def test_a_transfer_that_the_producer_should_know_and_does_not_fails_at_once():
    world = World(ONE_TO_ONE)
    world.fetch("t", 1.0, 2.0, computed=True)
    over(world)
    assert endings(world, "t") == {"D0": Ending.FAILED} and "not known" in cause(world, "D0")
    assert released_s(world, "D0") < 1.1


@pytest.mark.parametrize("at_s", [0.5, 1.05, 1.2, 1.45, 1.6, 2.0])
@pytest.mark.parametrize("order", ["grant first", "grant meanwhile"])
def test_a_cancel_at_the_consumer_frees_the_producer_soon(order, at_s):
    world = World(ONE_TO_ONE)
    begin(world, order)
    world.cancel("D0", "t", at_s)
    over(world)
    if at_s > 1.0 and endings(world, "t") != everywhere(world, Ending.DONE):
        assert endings(world, "t") == everywhere(world, Ending.CANCELLED)
        assert released_s(world, "P0") <= max(at_s, world.ranks["P0"].finished.get("t", 0.0)) + 0.2


@pytest.mark.parametrize("at_s", [1.05, 1.2, 1.4])
def test_a_cancel_at_the_producer_fails_the_consumer_soon(at_s):
    world = World(ONE_TO_ONE)
    begin(world, "grant meanwhile")
    world.cancel("P0", "t", at_s)
    over(world)
    assert endings(world, "t") == {"P0": Ending.CANCELLED, "D0": Ending.FAILED}
    assert released_s(world, "P0") <= at_s + 0.1 and released_s(world, "D0") <= max(at_s, 1.3) + 0.2
    assert "abort" in cause(world, "D0")


def test_a_cancelled_producer_keeps_its_blocks_while_a_write_reads_them():
    world = World(ONE_TO_ONE, Faults(write_s={0: 8.0}))
    begin(world, "grant first")
    world.cancel("P0", "t", 2.0)
    over(world)
    assert 9.0 < released_s(world, "P0") < 10.0


def test_a_consumer_keeps_its_blocks_until_nothing_can_write_to_them():
    world = World(ONE_TO_ONE, Faults(revoke_s=7.0, write_s={0: 5.0}))
    begin(world, "grant first")
    world.cancel("D0", "t", 2.0)
    over(world)
    assert released_s(world, "D0") == pytest.approx(9.0)


@pytest.mark.parametrize("order", ORDERS)
def test_a_producer_that_is_known_to_be_gone_fails_its_transfers_at_once(order):
    world = World(ONE_TO_ONE, Faults(write_s=dict.fromkeys(range(100), 20.0)))
    crash_s = begin(world, order) + 1.0
    world.crash("P0", crash_s, back_s=None)
    world.lose("P0", crash_s + 0.1)
    over(world)
    assert endings(world, "t") == {"D0": Ending.FAILED} and cause(world, "D0") == "the producer is gone"
    assert released_s(world, "D0") <= crash_s + 0.2


def test_a_peer_that_was_gone_serves_again_in_its_next_life():
    world = World(ONE_TO_ONE)
    begin(world, "grant first", "before")
    world.crash("P0", 1.7, back_s=5.0)
    world.lose("P0", 1.8)
    begin(world, "sequential", "after", 10.0)
    over(world)
    assert endings(world, "before") == {"D0": Ending.FAILED}
    assert endings(world, "after") == everywhere(world, Ending.DONE)


@pytest.mark.parametrize("topology", ["1P1D", "two to two", "an idle source"])
@pytest.mark.parametrize("order", ["sequential", "grant first"])
def test_a_request_that_is_preempted_before_anything_was_sent_is_fetched_all_the_same(order, topology):
    world = World(TOPOLOGIES[topology], granularity=Granularity.FULL)
    world.fetch("t", 2.5 if order == "sequential" else 0.5, 3.0, computed=order == "sequential")
    world.open("t", 1.0, chunks=(10, TOKENS))
    for at_s in (1.05, 1.75):
        world.preempt("t", at_s, chunks=(10, TOKENS))
    over(world)
    assert endings(world, "t") == everywhere(world, Ending.DONE)


@pytest.mark.parametrize("write_s", [0.02, 0.3, 6.0])
def test_a_request_that_is_preempted_after_something_was_sent_ends_on_both_sides(write_s):
    world = World(ONE_TO_ONE, Faults(write_s=dict.fromkeys(range(100), write_s)))
    begin(world, "grant first")
    world.preempt("t", 1.75)
    over(world)
    assert endings(world, "t") == {"P0": Ending.CANCELLED, "D0": Ending.FAILED}
    assert cause(world, "P0") == "preempted" and "preempted" in cause(world, "D0")
    assert released_s(world, "D0") <= 1.8
    assert released_s(world, "P0") <= max(1.75 + write_s, world.ranks["P0"].finished["t"])


def test_a_silent_producer_is_given_up_after_a_lease():
    world = World(ONE_TO_ONE, Faults(cuts=[(1.35, 10_000.0)]))
    begin(world, "grant meanwhile")
    over(world)
    assert endings(world, "t") == {"D0": Ending.FAILED, "P0": Ending.EXPIRED}
    assert 1.3 + TIMING.lease_s <= released_s(world, "D0") <= 1.35 + TIMING.lease_s + TIMING.retry_s


def test_what_the_consumer_has_already_does_not_travel():
    world = World(ONE_TO_ONE, granularity=Granularity.FULL)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.1, computed=True, first_token=16)
    over(world, first_token=16)
    assert endings(world, "t") == everywhere(world, Ending.DONE)
    assert {at[2] for at in world.ranks["D0"].memory} == set(range(16, TOKENS))


@pytest.mark.parametrize("first_token, ending", [(2, Ending.FAILED), (TOKENS, Ending.DONE)])
def test_tokens_that_cut_what_moves_together_are_refused_and_nothing_to_move_is_done(first_token, ending):
    world = World(ONE_TO_ONE)
    world.open("t", 1.0)
    world.fetch("t", 2.0, 2.1, computed=True, first_token=first_token)
    over(world, first_token)
    assert endings(world, "t") == everywhere(world, ending)
    assert world.writes == 0
