"""Threads for a library that waits by asking in a loop: they give way, and what hangs in them holds up nobody."""

from __future__ import annotations

import os
import threading

import pytest
from simulated.waiting import wait_for

from store_client.tiers.base import TierError
from store_client.tiers.mooncake.memory import Range
from store_client.tiers.mooncake.movers import _AT_ONCE, Movers
from store_client.tiers.workers import Workers

PATIENT_S = 120.0


def test_workers_give_way_and_nobody_else_does():
    def turn() -> tuple[int, int]:
        return os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)

    own, workers = turn(), Workers("test", 1)
    assert workers.run([turn], PATIENT_S) == [(min(own[0] + 10, 19), os.SCHED_BATCH)]
    assert turn() == own
    workers.close()


def test_a_call_gets_names_and_buffers_and_gives_the_status_of_each_page():
    movers, told = Movers("test"), []

    def call(*arguments: object) -> tuple[int, ...]:
        told.append(arguments)
        return 0, -704

    buffers = [[Range(10, 12)], [Range(20, 24), Range(30, 31)]]
    assert movers.move(call, ("a", "b"), buffers, "config", deadline_s=PATIENT_S) == [0, -704]
    assert told == [(["a", "b"], [[10], [20, 30]], [[2], [4, 1]], "config")]
    with pytest.raises(ZeroDivisionError):
        movers.move(lambda *_: 1 // 0, ["a"], [[]], deadline_s=PATIENT_S)
    movers.close()


def test_where_all_calls_hang_another_one_ends_at_its_deadline():
    movers, go, begun = Movers("test"), threading.Event(), []

    def hang(*_: object) -> list[int]:
        begun.append(1)
        go.wait(PATIENT_S)
        return [0]

    hanging = [
        threading.Thread(target=movers.move, args=(hang, ["a"], [[]]), kwargs={"deadline_s": PATIENT_S})
        for _ in range(_AT_ONCE)
    ]
    for thread in hanging:
        thread.start()
    wait_for(lambda: len(begun) == _AT_ONCE)
    with pytest.raises(TierError) as raised:
        movers.move(hang, ["a"], [[]], deadline_s=0.01)
    assert raised.value.cause == "timeout"
    go.set()
    for thread in hanging:
        thread.join(PATIENT_S)
    assert movers.move(hang, ["a"], [[]], deadline_s=PATIENT_S) == [0], "and goes on once they are back"
    movers.close()
