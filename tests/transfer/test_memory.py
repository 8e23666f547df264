"""Registered and granted memory, against a model that counts byte by byte."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.testing.memory import int64
from transfer.transports.base import Cause, Completion, Outcome, TransferError, first_outside
from transfer.transports.memory import Memory

BASE = 1 << 20


def write():
    return Completion(deadline_at=float("inf"))


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@given(ranges, ranges)
def test_a_grant_covers_exactly_the_bytes_of_its_ranges(granted, pieces):
    memory = Memory()
    memory.register(BASE, 100)
    addresses = int64(*(BASE + start for start, _ in granted))
    grant = memory.grant(addresses, int64(*(size for _, size in granted)))
    writable = {BASE + start + i for start, size in granted for i in range(size)}
    assert {a + i for a, n in zip(grant.addresses, grant.nbytes, strict=True) for i in range(n)} == writable
    assert (grant.addresses[1:] > (grant.addresses + grant.nbytes)[:-1]).all()
    for start, size in pieces:
        if size:
            wanted = {BASE + start + i for i in range(size)}
            assert grant.covers(int64(BASE + start), int64(size)) == (wanted <= writable)


@pytest.mark.parametrize(
    "address, nbytes",
    [(9, 1), (20, 1), (19, 2), (10, 11), (10, -1), (-5, 1), (0, 0), (10, 2**63 - 1), (2**63 - 1, 1), (-(2**63), 1)],
)
def test_no_piece_slips_past_the_ends_or_through_an_overflow(address, nbytes):
    ranges = int64(10), int64(10)
    assert first_outside([15, address], [1, nbytes], *ranges) == 1
    assert first_outside(int64(15, address), int64(1, nbytes), *ranges) == 1


def test_the_last_byte_is_inside():
    for kind in (list, np.array):
        assert first_outside(kind([10, 19]), kind([10, 1]), int64(10), int64(10)) is None


def test_a_piece_over_two_regions_is_outside():
    memory = Memory()
    memory.register(BASE, 10)
    memory.register(BASE + 10, 10)
    with pytest.raises(ValueError, match="source piece 1, 2 bytes at"):
        memory.begin_sending(write(), int64(BASE, BASE + 9), int64(5, 2))


def test_overlapping_regions_are_refused():
    memory = Memory()
    memory.register(BASE, 10)
    with pytest.raises(ValueError, match="overlaps"):
        memory.register(BASE + 9, 10)
    memory.register(BASE + 10, 10)


@pytest.mark.parametrize("address, nbytes", [(0, 1), (BASE, 0), (BASE, -1), (-1, 5), (BASE, 1 << 60)])
def test_a_region_without_a_sane_address_and_size_is_refused(address, nbytes):
    with pytest.raises(ValueError, match="expected a positive"):
        Memory().register(address, nbytes)


def test_what_is_not_registered_cannot_be_granted():
    memory = Memory()
    memory.register(BASE, 10)
    with pytest.raises(ValueError, match="outside of registered memory"):
        memory.grant(int64(BASE, BASE + 8), int64(1, 3))


def test_unregistering_fails_its_readers_and_ends_its_grants_only():
    memory = Memory()
    first, second = memory.register(BASE, 10), memory.register(BASE + 100, 10)
    writes = [write(), write()]
    for one, region in zip(writes, (first, second), strict=True):
        memory.begin_sending(one, int64(region.address), int64(4))
    grants = [memory.grant(int64(region.address), int64(4)) for region in (first, second)]
    memory.unregister(first)
    memory.unregister(first)
    assert writes[0].outcome.cause is Cause.SOURCE and writes[1].outcome is None
    assert memory.granted(grants[0].key) is None and memory.granted(grants[1].key) is not None


def test_a_batch_that_ended_is_not_failed_later():
    memory = Memory()
    region, over = memory.register(BASE, 10), write()
    memory.begin_sending(over, int64(BASE), int64(4))
    memory.end_sending(over)
    memory.unregister(region)
    assert over.outcome is None


def test_revoke_waits_for_the_step_that_writes():
    memory = Memory()
    memory.register(BASE, 10)
    held = memory.granted(memory.grant(int64(BASE), int64(10)).key)
    returned = threading.Event()
    with held.lock:
        thread = threading.Thread(target=lambda: (memory.revoke(held.grant), returned.set()))
        thread.start()
        assert not returned.wait(0.05)
        assert not held.revoked
    assert returned.wait(60)
    thread.join()
    assert held.revoked and memory.granted(held.grant.key) is None


def test_a_completion_keeps_its_first_outcome():
    completion, seen = Completion(deadline_at=float("inf")), []
    completion.add_done_callback(seen.append)
    assert completion.settle(Outcome()) and not completion.settle(Outcome(Cause.DEADLINE))
    completion.cancel()
    completion.add_done_callback(seen.append)
    assert completion.outcome == Outcome() and seen == [Outcome(), Outcome()]


def test_the_source_is_let_go_before_anybody_hears_of_a_failure():
    completion, seen = Completion(deadline_at=float("inf")), []
    completion.stop_with(lambda: seen.append(completion.outcome))
    completion.add_done_callback(seen.append)
    completion.cancel()
    assert seen[0] is None and seen[1].cause is Cause.CANCELLED and len(seen) == 2
    fine = Completion(deadline_at=float("inf"))
    fine.stop_with(lambda: seen.append("stopped"))
    fine.settle(Outcome())
    assert len(seen) == 2


class Follower:
    """Notes what it is told; `refuses` addresses."""

    place, takes_device = None, False

    def __init__(self, name, refuses=()):
        self.name, self.refuses, self.told = name, refuses, []

    def register(self, region):
        self.told.append(("register", region.address))
        if region.address in self.refuses:
            raise OSError("no room on the card")

    def unregister(self, region):
        self.told.append(("unregister", region.address))

    def close(self):
        self.told.append("close")


@pytest.mark.parametrize("takes_device", [False, True])
def test_a_follower_that_serves_a_device_is_told_of_stages_only_unless_it_uses_what_it_can_of_all(takes_device):
    memory, follower = Memory(), Follower("card")
    follower.place, follower.takes_device = "a device", takes_device
    memory.register(BASE, 10)
    memory.follow(follower)
    stage = memory.register(BASE + 100, 10, is_stage=True)
    memory.register(BASE + 200, 10)
    memory.unregister(stage)
    memory.unfollow(follower)
    stages = [("register", BASE + 100), ("unregister", BASE + 100)]
    ended = [("unregister", BASE), ("unregister", BASE + 200)]
    others = [("register", BASE), stages[0], ("register", BASE + 200), stages[1], *ended]
    assert follower.told == (others if takes_device else stages)


def test_a_follower_is_told_of_all_that_is_registered_and_of_its_end():
    memory, follower = Memory(), Follower("card")
    first, _ = memory.register(BASE, 10), memory.register(BASE + 100, 10)
    memory.follow(follower)
    memory.register(BASE + 200, 10)
    memory.unregister(first)
    memory.unregister(first)
    memory.unfollow(follower)
    memory.unfollow(follower)
    memory.register(BASE + 300, 10)
    told = [("register", BASE), ("register", BASE + 100), ("register", BASE + 200), ("unregister", BASE)]
    assert follower.told == [*told, ("unregister", BASE + 100), ("unregister", BASE + 200)]


def test_a_region_is_registered_before_it_is_used_and_until_nothing_uses_it():
    memory, follower = Memory(), Follower("card")
    follower.register = lambda region: follower.told.append(memory.regions)
    follower.unregister = lambda region: follower.told.append(memory.granted(grant.key))
    memory.follow(follower)
    region = memory.register(BASE, 10)
    grant = memory.grant(int64(BASE), int64(10))
    memory.unregister(region)
    assert follower.told == [[], None]


def test_a_follower_that_refuses_what_is_registered_follows_nothing():
    memory, follower = Memory(), Follower("card", refuses=[BASE + 100])
    memory.register(BASE, 10), memory.register(BASE + 100, 10)
    with pytest.raises(TransferError, match=f"cannot use the 10 bytes at {BASE + 100:#x}: no room on the card"):
        memory.follow(follower)
    memory.register(BASE + 200, 10)
    assert follower.told == [("register", BASE), ("register", BASE + 100), ("unregister", BASE)]


def test_a_follower_that_refuses_further_memory_is_closed_and_the_others_go_on(caplog):
    memory, followers = Memory(), [Follower("card", refuses=[BASE]), Follower("another")]
    for follower in followers:
        memory.follow(follower)
    memory.register(BASE, 10)
    memory.grant(int64(BASE), int64(10))
    assert [follower.told for follower in followers] == [[("register", BASE), "close"], [("register", BASE)]]
    assert [record.getMessage() for record in caplog.records] == [
        f"transport card is closed: it cannot use the 10 bytes at {BASE:#x}: no room on the card"
    ]


def test_a_follower_that_fails_at_the_end_costs_a_line(caplog):
    memory, follower = Memory(), Follower("card")
    memory.follow(follower)
    follower.unregister = lambda region: 1 / 0
    memory.unregister(memory.register(BASE, 10))
    assert "card cannot let go of memory: ZeroDivisionError" in caplog.text
