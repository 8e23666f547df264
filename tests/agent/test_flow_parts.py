"""When a tier is left alone, how fast it may be written to, and whether fetching beats computing."""

from __future__ import annotations

import os
import threading
import time
from queue import SimpleQueue

import pytest

from store_client.agent.breaker import LASTING_PAUSE_S, LONGEST_PAUSE_S, Breaker
from store_client.agent.budget import Bandwidth
from store_client.agent.clerk import Clerk
from store_client.agent.lanes import Lane
from store_client.agent.worth import Speed, is_worth_it


def breaker() -> Breaker:
    """One whose pauses are as long as they may be."""
    return Breaker(chance=lambda: 1.0)


def test_one_failure_opens_it_and_a_pause_later_one_call_is_tried():
    one = breaker()
    assert one.allows(0.0) and one.enter(0.0)
    assert one.fail("unavailable", 0.0)
    assert not one.allows(0.9) and not one.enter(0.9) and one.cause == "unavailable"
    assert one.allows(1.0) and one.enter(1.0)
    assert not one.allows(1.0) and not one.enter(1.0), "one call decides"
    one.succeed()
    assert one.enter(1.0) and one.enter(1.0) and one.cause == ""


@pytest.mark.parametrize("cause", ["timeout", "error"])
def test_what_may_happen_once_opens_it_only_after_some_in_a_row(cause):
    one = breaker()
    assert [one.fail(cause, 0.0) for _ in range(3)] == [False, False, True]
    one.succeed()
    assert [one.fail(cause, 0.0) for _ in range(2)] == [False, False]
    one.succeed()
    assert not one.fail(cause, 0.0)


def test_pauses_grow_up_to_a_minute_and_begin_anew_after_a_success():
    one, now, pauses = breaker(), 0.0, []
    one.fail("unavailable", now)
    for _ in range(10):
        _, pause_s = one.state(now)
        pauses.append(pause_s)
        now += pause_s
        assert one.enter(now)
        one.fail("unavailable", now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, LONGEST_PAUSE_S]
    now += 60
    assert one.enter(now)
    one.succeed()
    one.fail("unavailable", now)
    assert one.state(now) == ("open", 1.0)


def test_what_only_a_person_can_cure_is_tried_rarely():
    one = breaker()
    assert one.fail("timeout", 0.0, lasting=True)
    assert one.state(0.0) == ("open", LASTING_PAUSE_S)


def test_pauses_differ_by_chance():
    lucky = Breaker(chance=lambda: 0.0)
    lucky.fail("unavailable", 0.0)
    assert lucky.state(0.0) == ("open", 0.5)


def test_calls_that_were_under_way_when_it_opened_do_not_prolong_it():
    one = breaker()
    one.fail("unavailable", 0.0)
    one.fail("unavailable", 0.9)
    assert one.allows(1.0)


def test_a_call_that_says_nothing_leaves_the_trial_to_the_next():
    one = breaker()
    one.fail("unavailable", 0.0)
    assert one.enter(1.0)
    assert one.state(1.0)[0] == "trying"
    one.leave()
    assert one.enter(1.0)


def test_bytes_are_spread_over_time():
    budget = Bandwidth(1000.0)
    assert budget.wait_s(500, 10.0) == 0.0
    assert budget.wait_s(500, 10.0) == pytest.approx(0.25), "a quarter of a second may be used at once"
    assert budget.wait_s(500, 10.0) == pytest.approx(0.75)
    assert budget.wait_s(500, 100.0) == 0.0
    assert Bandwidth(None).wait_s(1 << 60, 0.0) == 0.0


def test_no_more_than_the_rate_passes_in_the_long_run():
    budget, now, sent = Bandwidth(1000.0), 0.0, 0
    while now < 100.0:
        now += budget.wait_s(700, now)
        sent += 700
    assert 1000.0 * now <= sent <= 1000.0 * now + 250 + 700


def test_a_speed_that_was_not_measured_is_not_known():
    speed = Speed()
    assert speed.expected_s(1 << 20, 0.0) is None
    speed.answered(0.01)
    assert speed.expected_s(1 << 20, 0.0) is None


def test_latency_and_bandwidth_follow_what_is_measured():
    speed = Speed()
    speed.answered(0.01)
    speed.read(10_000_000, 0.11, 1, 0.0)
    assert speed.bandwidth == pytest.approx(1e8)
    assert speed.expected_s(20_000_000, 0.0) == pytest.approx(0.21)
    for _ in range(60):
        speed.answered(0.03)
        speed.read(10_000_000, 0.23, 2, 0.0)
    assert speed.latency_s == pytest.approx(0.03, rel=1e-3)
    assert speed.bandwidth == pytest.approx(1e8, rel=1e-2), "two at once, each half as fast"


def test_what_was_measured_long_ago_is_not_known_any_more():
    speed = Speed()
    speed.read(1000, 10.0, 1, 0.0)
    assert speed.expected_s(1000, 59.0) is not None
    assert speed.expected_s(1000, 61.0) is None, "so it is tried now and then"
    speed.read(1000, 1.0, 1, 61.0)
    assert speed.bandwidth == pytest.approx(1000), "what was before does not count"


def test_who_stood_still_takes_the_tier_to_be_slow_for_a_second():
    speed = Speed()
    speed.read(1_000_000, 0.001, 1, 0.0)
    for _ in range(4):
        speed.read(1_000_000, 3.0, 4, 3.0)
    assert (speed.expected_s(1_000_000, 3.9) or 0.0) > 0.05
    assert speed.expected_s(1_000_000, 4.1) is None, "so it is tried"
    speed.read(1_000_000, 0.001, 1, 4.2)
    assert speed.expected_s(1_000_000, 60.0) == pytest.approx(0.001)


def test_a_tier_that_becomes_slow_is_known_to_be_so_after_a_few_tries():
    speed, now, tries = Speed(), 0.0, 0
    speed.read(1_000_000, 0.001, 1, now)
    while now < 300.0:
        if (expected_s := speed.expected_s(1_000_000, now)) is None or expected_s < 0.5:
            tries, now = tries + 1, now + 1.0
            speed.read(1_000_000, 1.0, 1, now)
        now += 0.1
    assert tries <= 8 and speed.bandwidth == pytest.approx(1e6), "three at first, then once a minute"


def test_a_tier_that_is_slow_each_time_it_is_trusted_is_tried_ever_more_seldom():
    speed, now, turns = Speed(), 0.0, 0
    while now < 1000.0:
        if speed.expected_s(1_000_000, now) is None:
            turns += 1
            speed.read(1_000_000, 0.001, 1, now)
            speed.read(1_000_000, 1.0, 1, now + 1.1)
        now += 1.0
    assert turns < 30


def test_one_question_that_took_long_says_little_of_the_next():
    speed = Speed()
    speed.answered(0.001)
    speed.answered(3.0)
    assert speed.latency_s < 0.002
    for _ in range(60):
        speed.answered(3.0)
    assert speed.latency_s == pytest.approx(3.0, rel=1e-2), "what goes on is learned"


@pytest.mark.parametrize(("expected_s", "tokens", "speed", "worth"), [
    (None, 64, 1000.0, True), (1.0, 64, None, True), (1.0, 1000, 1000.0, True), (1.01, 1000, 1000.0, False),
    (0.01, 1000, 1e9, False),
])  # fmt: skip
def test_fetching_is_worth_it_where_computing_takes_longer(expected_s, tokens, speed, worth):
    assert is_worth_it(expected_s, tokens, speed) is worth


def test_a_lane_whose_jobs_all_hang_takes_no_more_and_says_so():
    lane, go, failed = Lane("test", 2), threading.Event(), []

    def hang() -> None:
        lane.expect(0.0)
        go.wait(120)
        lane.back()

    for name in ("one", "two", "waiting"):
        assert lane.run(hang if name != "waiting" else lambda: failed.append("ran"), failed.append) == ""
    hung = []
    while len(hung) < 3:
        hung += lane.overdue(float("inf"))
    for job in hung:
        job.fail("hanging")
    assert failed == ["hanging"] * 3 and lane.stuck
    assert lane.run(hang, failed.append) == "hanging"
    go.set()
    assert lane.close(time.monotonic() + 120) and not lane.stuck
    assert lane.run(hang, failed.append) == "closed"


def test_jobs_that_wait_are_told_when_a_lane_is_closed():
    lane, runs, go, told = Lane("test", 1), threading.Event(), threading.Event(), []
    lane.run(lambda: runs.set() or go.wait(120), told.append)
    assert runs.wait(120)
    lane.run(lambda: told.append("ran"), told.append)
    assert not lane.close(0.0)
    assert told == ["closed"]
    go.set()
    assert lane.close(time.monotonic() + 120)


def test_where_no_thread_can_be_started_a_job_is_refused(monkeypatch):
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert Lane("test", 2).run(lambda: None, lambda _: None) == "threads"


def turn() -> tuple[int, int]:
    """Of the calling thread: its weight, and whether it interrupts others when it wakes."""
    return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def test_threads_that_move_bytes_give_way_and_those_that_somebody_waits_for_do_not():
    own, seen = turn(), SimpleQueue[tuple[int, int]]()
    for urgent, expected in ((False, (min(own[0] + 10, 19), os.SCHED_BATCH)), (True, own)):
        lane = Lane("test", 1, urgent=urgent)
        assert not lane.run(lambda: seen.put(turn()), lambda _: None)
        assert seen.get(timeout=120) == expected
        assert lane.close(time.monotonic() + 120)
    assert turn() == own


def test_a_clerk_returns_and_raises_what_it_was_given_in_a_thread_of_its_own():
    clerk = Clerk("test")
    assert clerk.run(threading.get_ident) not in (threading.get_ident(), None)
    with pytest.raises(ZeroDivisionError):
        clerk.run(lambda: 1 // 0)
    assert clerk.run(lambda: "next") == "next", "it goes on"


def test_a_clerk_has_the_usual_weight_and_interrupts_nobody():
    own = turn()
    assert Clerk("test").run(turn) == (own[0], os.SCHED_BATCH)
    assert turn() == own


def test_a_clerk_that_is_closed_keeps_nobody_waiting():
    clerk = Clerk("test")
    clerk.close()
    assert clerk.run(threading.get_ident) == threading.get_ident()
