"""Which rail a slice goes over, and when one that broke is tried again: without cards or clocks."""

from __future__ import annotations

import logging
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.transports.rdma.paths import (
    FIRST_RETRY_S,
    HOPELESS_TRIES,
    LAST_RETRY_S,
    QUEUED_NBYTES,
    STEADY_S,
    Path,
    Paths,
    RailCounts,
)

MIB = 1 << 20
GB = 1e9


def paths_of(*nominal: float) -> Paths:
    """All in since long ago."""
    made = Paths([Path(i, f"card{i}:1", speed) for i, speed in enumerate(nominal)], RailCounts())
    for path in made.all:
        path.begin_try()
        made.tried(path, -1000.0, "")
    return made


def carry(paths: Paths, speeds: list[float], slices: int, nbytes: int, now: float = 0.0) -> tuple[list[int], float]:
    """Bytes that each rail carried, and when the last slice was over; each does one slice after the other."""
    queues: list[deque[float]] = [deque() for _ in speeds]
    free_at = [now] * len(speeds)
    carried = [0] * len(speeds)
    left = slices
    while left or any(queues):
        while left and (path := paths.best()):
            path.order(nbytes, now)
            free_at[path.number] = max(free_at[path.number], now) + nbytes / speeds[path.number]
            queues[path.number].append(free_at[path.number])
            left -= 1
        first = min((queue[0], i) for i, queue in enumerate(queues) if queue)[1]
        now = queues[first].popleft()
        carried[first] += nbytes
        paths.over(paths.all[first], nbytes, now, moved=True)
    return carried, now


def test_equal_rails_share_equally():
    (one, other), took_s = carry(paths_of(10 * GB, 10 * GB), [10 * GB, 10 * GB], 200, 8 * MIB)
    assert abs(one - other) <= 16 * MIB
    assert took_s <= 1.05 * (200 * 8 * MIB / (20 * GB))


@given(st.lists(st.floats(1.0, 20.0), min_size=1, max_size=4), st.sampled_from([1, 4, 16]))
def test_all_rails_together_take_little_longer_than_their_speeds_add_up_to(gb_per_s, mib):
    """Whatever their links promised: what was measured counts."""
    speeds = [speed * GB for speed in gb_per_s]
    paths = paths_of(*[5 * GB] * len(speeds))
    carried, took_s = carry(paths, speeds, 4000 // mib, mib * MIB)
    ideal_s = sum(carried) / sum(speeds)
    last_s = 2 * (mib + 4) * MIB / min(speeds)  # what is bound to the slowest at the end
    assert took_s <= 1.1 * ideal_s + last_s + QUEUED_NBYTES / sum(speeds)


def test_a_rail_that_has_become_slow_gets_less():
    paths = paths_of(10 * GB, 10 * GB)
    _, now = carry(paths, [10 * GB, 10 * GB], 100, 4 * MIB)
    (fast, slow), _ = carry(paths, [10 * GB, 2 * GB], 400, 4 * MIB, now)
    assert 3 * slow < fast < 8 * slow


def test_what_is_bound_to_one_rail_is_bounded():
    paths = paths_of(10 * GB)
    count = 0
    while path := paths.best():
        path.order(4 * MIB, 0.0)
        count += 1
    assert count * 4 * MIB == QUEUED_NBYTES
    paths.over(paths.all[0], 4 * MIB, 1.0, moved=False)
    assert paths.best()


def test_a_rail_that_broke_carries_nothing_until_it_was_tried(caplog):
    paths = paths_of(10 * GB, GB)
    broken = paths.all[0]
    assert paths.best() is broken
    with caplog.at_level(logging.INFO):
        for _ in range(3):  # each slice that was under way says so
            paths.broke(broken, broken.epoch, 0.0, "why")
    assert paths.best() is paths.all[1]
    assert paths.due(0.0) == [broken], "at once"
    before = broken.epoch
    broken.begin_try()
    paths.broke(broken, before, 0.0, "why")
    assert broken.epoch == before + 1 and not paths.due(1e9), "one try at a time"
    paths.tried(broken, 0.1, "")
    paths.broke(broken, before, 0.2, "why")
    assert paths.best() is broken, "what comes late from an epoch that is over counts no more"
    assert caplog.text.count("rail card0:1 to a peer is out: why") == 1
    assert paths._counts.take() == {"rail_failures": {"card0:1": 1}, "rail_recoveries": {"card0:1": 1}}
    assert paths._counts.take() == {}


def test_one_that_is_back_is_as_fast_as_its_link_until_it_is_measured_again():
    path = Path(0, "card0:1", GB)
    path.back(0.0)
    path.order(1 << 20, 0.0)
    path.over(1 << 20, 60.0, moved=True)
    assert path.bytes_per_s < GB / 1000
    path.broke(60.0)
    path.back(61.0)
    assert path.bytes_per_s == GB


def test_tries_come_ever_later_up_to_a_limit():
    paths = paths_of(GB, GB)
    path, now, waits = paths.all[0], 0.0, []
    paths.broke(path, path.epoch, now, "why")
    for _ in range(15):
        assert path.try_at is not None
        waits.append(path.try_at - now)
        now = path.try_at
        path.begin_try()
        paths.tried(path, now, "why not")
    assert waits[:4] == pytest.approx([0.0, FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S])
    assert waits == sorted(waits) and waits[-1] == LAST_RETRY_S


def test_who_has_waited_longest_is_tried_first():
    paths = Paths([Path(i, f"card{i}:1", GB) for i in range(4)], RailCounts())
    now, tried = 0.0, []
    while len(tried) < 4:
        path = paths.due(now)[0]
        tried.append(path.number)
        path.begin_try()
        now += 5 * FIRST_RETRY_S  # as long as it takes until nobody has answered
        paths.tried(path, now, "why not")
    assert tried == [0, 1, 2, 3], "none a second time before all others had their turn"


def test_one_that_breaks_as_soon_as_it_is_back_is_tried_ever_later_too_and_a_steady_one_at_once():
    paths = paths_of(GB)
    path, now, waits = paths.all[0], 0.0, []
    for _ in range(5):
        paths.broke(path, path.epoch, now, "why")
        assert path.try_at is not None
        waits.append(path.try_at - now)
        now = path.try_at
        path.begin_try()
        paths.tried(path, now, "")
    assert waits == pytest.approx([0.0, FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S, 8 * FIRST_RETRY_S])
    paths.broke(path, path.epoch, now + STEADY_S, "why")
    assert path.try_at == now + STEADY_S


def test_the_peer_is_lost_when_every_rail_has_failed_again_and_again():
    paths = paths_of(GB, GB)
    for path in paths.all:
        paths.broke(path, path.epoch, 0.0, "why")
    for _ in range(HOPELESS_TRIES):
        assert not paths.is_hopeless
        for path in paths.all:
            path.begin_try()
            paths.tried(path, 0.0, "why not")
    assert paths.is_hopeless and paths.best() is None
    paths.tried(paths.all[1], 1.0, "")
    assert not paths.is_hopeless and paths.best() is paths.all[1]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["slice", "moved", "broke", "try ok", "try fails"]))))
def test_only_rails_that_are_in_are_given_slices_and_each_rail_is_in_or_tried_or_to_be_tried(steps):
    paths, orders = paths_of(GB, 2 * GB, GB), [0, 0, 0]
    for now, (number, step) in enumerate(steps):
        path = paths.all[number]
        if step == "slice" and (best := paths.best()):
            assert best.is_in
            best.order(MIB, now)
            orders[best.number] += 1
        elif step in ("moved", "broke") and orders[number]:
            orders[number] -= 1
            paths.over(path, MIB, now, moved=step == "moved")
            if step == "broke":
                paths.broke(path, path.epoch, now, "why")
        elif step.startswith("try") and path in paths.due(now):
            path.begin_try()
            paths.tried(path, now, "" if step == "try ok" else "why not")
        assert [path.in_flight_nbytes for path in paths.all] == [MIB * count for count in orders]
        assert all(path.is_in != (path.try_at is not None) for path in paths.all)
    if any(path.is_in for path in paths.all):
        assert paths.best()
