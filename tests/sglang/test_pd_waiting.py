"""While SGLang's scheduler has nothing to do but to ask for transfers, it leaves the processor to others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_backend import speed
from sglang_backend.pd import manager


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=100.0, slept=0)

    def sleep(seconds: float) -> None:
        clock.slept += 1
        clock.now_s += seconds

    monkeypatch.setattr(manager, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    return clock


def idle_manager() -> SimpleNamespace:
    return SimpleNamespace(_waiting_room=-1, _waited_s=0.0, _waited_steps=0)


def waits(clock: SimpleNamespace, rooms: list[int], passes: int, pass_s: float) -> list[int]:
    """How often each pass waits, in which each of `rooms` asks."""
    found = []
    for _ in range(passes):
        before, clock.now_s = clock.slept, clock.now_s + pass_s
        for room in rooms:
            manager.MooncakeConnectorKVManager.give_way(clock.manager, room)
        found.append(clock.slept - before)
    return found


def test_one_room_waits_for_all_and_only_where_nothing_is_computed(clock: SimpleNamespace) -> None:
    clock.manager = idle_manager()
    assert waits(clock, [7, 8, 9], passes=4, pass_s=0.0005) == [0, 1, 1, 1]
    assert waits(clock, [7, 8, 9], passes=3, pass_s=0.005) == [0, 0, 0], "steps of the model take longer"
    assert waits(clock, [8, 9], passes=300, pass_s=0.0005)[-1] == 1, "another room waits when that one has ended"


def test_a_pass_that_ended_a_step_does_not_wait_however_short_it_was(clock: SimpleNamespace) -> None:
    clock.manager = idle_manager()
    found = []
    for batches in (0, 0, 1, 1, 0, 0):
        for _ in range(batches):
            speed._measures(lambda *args: None, None, None, None)
        found += waits(clock, [7, 8], passes=1, pass_s=0.0005)
    assert found == [0, 1, 0, 0, 1, 1], "a small model's step takes a millisecond on a GPU"
