"""Jobs of the mover: each ends exactly once and in time, and a load takes pages as they land."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from causes import forget_causes
from simulated.waiting import wait_for
from store.landing import LandingSpace, LandingStore

import store_client.jobs
import store_client.mover
from store_client.base import Bytes, Shard
from store_client.jobs import CopyFailed, GivenUp, Load, Overtaken, Save
from store_client.mover import Mover
from store_client.sharded import ShardView
from store_client.testing import SHARD, chain, namespace, page_bytes

NBYTES = 8 * 64
KEYS = chain("a", 6)
DEADLINE_S = 1000.0
"""Of the clock of these tests, which they move on by hand."""
PATIENCE_S = 60.0


class Clock:
    """The real clock, some seconds ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """And one page a move."""
    clock = Clock()
    for module in (store_client.jobs, store_client.mover):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(store_client.jobs, "_MOVE_NBYTES", 0)
    monkeypatch.setattr(store_client.jobs, "_MOVE_PAGES", 1)
    forget_causes()
    return clock


@pytest.fixture
def space():
    space = LandingSpace(NBYTES)
    yield space
    space.let_read(1000)


@pytest.fixture
def view(space):
    return ShardView(LandingStore(space), namespace(), SHARD, NBYTES // 8)


@pytest.fixture
def mover():
    mover = Mover("load")
    yield mover
    mover.stop(PATIENCE_S)


class Memory:
    """An engine's memory: a row a page."""

    def __init__(self) -> None:
        self.rows = np.zeros((len(KEYS), NBYTES), dtype=np.uint8)

    def load(self, number: int, part: Shard, page: Bytes) -> None:
        assert part == SHARD
        self.rows[number] = page

    def save(self, number: int, page: Bytes) -> None:
        page[:] = self.rows[number]

    def fill(self) -> None:
        self.rows[:] = [page_bytes(key, NBYTES) for key in KEYS]

    def holds(self, count: int) -> bool:
        """The first pages, and nothing behind them."""
        right = all(np.array_equal(self.rows[i], page_bytes(KEYS[i], NBYTES)) for i in range(count))
        return right and not self.rows[count:].any()


@pytest.fixture
def memory() -> Memory:
    return Memory()


def load(view, memory, **changes):
    return Load(**about(view) | {"copy": memory.load} | changes)


def save(view, memory, **changes):
    return Save(**about(view) | {"copy": memory.save, "parent": None} | changes)


def about(view):
    now_s = store_client.jobs.time.monotonic()
    times = {"submitted_s": now_s, "since_s": now_s, "deadline_s": DEADLINE_S}
    return {"keys": KEYS, "view": lambda: view} | times


def over(job: Any) -> bool:
    return bool(job.over.wait(PATIENCE_S))


@pytest.fixture
def sure(space, request):
    """Whether the store says that pages are coming, or that they may be."""
    space.sure = request.param


in_both_words = pytest.mark.parametrize("sure", [False, True], ids=["pending", "coming"], indirect=True)


class TestLoadsThatGrow:
    @in_both_words
    def test_pages_are_taken_as_they_land_however_long_it_takes_in_all(self, mover, space, view, memory, clock, sure):
        space.expected = set(KEYS)
        space.land(KEYS[:2])
        job = load(view, memory)
        mover.submit(job)
        for number in range(2, len(KEYS)):
            wait_for(lambda number=number: job.pages == number)
            assert memory.holds(number) and mover.take_ended() == []
            clock.ahead_s += 0.9 * DEADLINE_S
            space.land(KEYS[number : number + 1])
        assert over(job)
        assert mover.take_ended() == [job] and mover.take_ended() == []
        assert (job.pages, job.cause) == (len(KEYS), "") and memory.holds(len(KEYS))

    def test_a_load_whose_pages_trickle_in_ends_after_ten_of_its_deadlines(self, mover, space, view, clock):
        keys = chain("many", 20)
        space.expected = set(keys)
        job = load(view, Memory(), keys=keys, copy=lambda number, part, page: None)
        mover.submit(job)
        wait_for(lambda: job.begun)
        for number in range(12):
            space.land(keys[number : number + 1])
            wait_for(lambda number=number: job.pages == number + 1)
            assert mover.take_ended() == []
            clock.ahead_s += 0.8 * DEADLINE_S
        space.land(keys[12:13])
        wait_for(lambda: job.pages == 13)
        clock.ahead_s += 0.8 * DEADLINE_S
        assert over(job) and (job.pages, job.cause) == (13, "not_landed")

    @pytest.mark.parametrize("landed", [0, 3], ids=["never delivers", "stalls"])
    @pytest.mark.parametrize("noticed_by", ["engine", "thread"])
    @in_both_words
    def test_a_load_ends_when_nothing_landed_for_its_deadline_and_touches_no_block_from_then_on(
        self, mover, space, view, memory, clock, landed, noticed_by, sure
    ):
        space.expected = set(KEYS)
        job = load(view, memory)
        mover.submit(job)
        space.land(KEYS[:landed])
        wait_for(lambda: job.awaits and job.pages == landed)
        clock.ahead_s += 0.9 * DEADLINE_S
        assert mover.take_ended() == [] and not job.over.is_set()
        clock.ahead_s += 0.2 * DEADLINE_S
        if noticed_by == "thread":
            assert over(job)
        else:
            wait_for(lambda: mover.take_ended() == [job])
        assert (job.pages, job.cause) == (landed, "not_landed")
        space.land(KEYS)
        other = load(view, Memory())
        mover.run(other)
        assert other.cause == "" and memory.holds(landed) and job.pages == landed

    def test_wrong_bytes_are_refused(self, mover, space, view, memory):
        space.expected = set(KEYS)
        job = load(view, memory)
        mover.submit(job)
        space.land(KEYS[:2])
        wait_for(lambda: job.pages == 2)
        space.land(KEYS[2:3], wrong=True)
        assert over(job)
        assert (job.pages, job.cause) == (2, "page_lost") and memory.holds(2)

    def test_promised_pages_are_asked_for_and_waited_for_until_the_store_has_heard_of_them(
        self, mover, space, view, memory, monkeypatch
    ):
        monkeypatch.setattr(store_client.jobs, "_HEARING_S", PATIENCE_S)
        space.sure, space.expected, space.deaf = True, set(KEYS), 3
        space.land(KEYS[:2])
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        wait_for(lambda: space.deaf == 0 and job.pages == 2)
        assert space.announced == [KEYS] and not job.over.is_set()
        space.land(KEYS[2:])
        assert over(job) and job.cause == "" and memory.holds(len(KEYS))

    def test_a_promised_page_of_which_the_store_never_hears_is_lost(self, mover, space, view, memory, clock):
        space.sure = True
        space.land(KEYS[:2])
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        wait_for(lambda: job.pages == 2)
        clock.ahead_s += store_client.jobs._HEARING_S
        assert over(job) and (job.pages, job.cause) == (2, "page_lost") and memory.holds(2)

    def test_a_page_that_was_coming_and_comes_no_more_ends_a_load_at_once(
        self, mover, space, view, memory, monkeypatch
    ):
        monkeypatch.setattr(store_client.jobs, "_HEARING_S", 1e9)
        space.sure, space.expected = True, set(KEYS)
        space.land(KEYS[:2])
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        wait_for(lambda: job.awaits)
        space.expected = set()
        assert over(job) and (job.pages, job.cause) == (2, "page_lost") and memory.holds(2)

    def test_what_was_heard_of_earlier_pages_says_nothing_of_the_next_one(
        self, mover, space, view, memory, clock, monkeypatch
    ):
        """The pages behind may come from other shards, which are asked for only once the earlier ones are there."""
        monkeypatch.setattr(store_client.jobs, "_HEARING_S", PATIENCE_S)
        space.sure, space.expected = True, set(KEYS[:4])
        space.land(KEYS[:2])
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        wait_for(lambda: job.awaits)
        clock.ahead_s += 2 * PATIENCE_S
        space.land(KEYS[2:4])
        wait_for(lambda: job.pages == 4 and (job.awaits or job.over.is_set()))
        assert not job.over.is_set()
        space.expected = set(KEYS[4:])
        space.land(KEYS[4:])
        assert over(job) and job.cause == "" and memory.holds(len(KEYS))

    def test_a_page_that_was_said_to_come_behind_those_that_landed_and_comes_no_more_ends_a_load_at_once(
        self, mover, space, view, memory, monkeypatch
    ):
        monkeypatch.setattr(store_client.jobs, "_HEARING_S", 1e9)
        monkeypatch.setattr(store_client.jobs, "_MOVE_PAGES", len(KEYS))
        space.sure, space.expected = True, set(KEYS)
        space.land(KEYS[:2])
        space.hold_reads()
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        space.wait_for_read()
        space.expected = set()
        space.let_read()
        assert over(job) and (job.pages, job.cause) == (2, "page_lost") and memory.holds(2)

    def test_a_page_that_is_not_on_its_way_ends_a_load_at_once(self, mover, space, view, memory):
        space.land([*KEYS[:2], *KEYS[3:]])
        job = load(view, memory)
        mover.run(job)
        assert (job.pages, job.cause) == (2, "page_lost") and memory.holds(2)

    def test_other_loads_go_on_while_one_waits(self, mover, space, view, memory):
        late = chain("late", len(KEYS))
        space.expected = set(late)
        waits = load(view, Memory(), keys=late)
        mover.submit(waits)
        wait_for(lambda: waits.begun)
        space.land(KEYS)
        for _ in range(3):
            mover.run(load(view, memory))
        assert memory.holds(len(KEYS)) and not waits.over.is_set()
        space.land(late)
        assert over(waits) and waits.cause == ""

    def test_a_load_whose_pages_landed_while_another_moved_is_not_late(self, mover, space, view, memory, clock):
        late = chain("late", len(KEYS))
        space.expected = set(late)
        waits, moves = load(view, Memory(), keys=late), load(view, memory)
        mover.submit(waits)
        wait_for(lambda: waits.begun)
        space.land(KEYS)
        space.hold_reads()
        mover.submit(moves)
        space.wait_for_read()
        space.land(late)
        clock.ahead_s += 0.9 * DEADLINE_S
        space.let_read()
        space.wait_for_read()
        clock.ahead_s += 0.9 * DEADLINE_S
        assert mover.take_ended() == []
        for _ in range(2 * len(KEYS) - 2):
            space.let_read()
            space.wait_for_read()
        assert mover.take_ended() == [moves]  # while the thread reads the last page of the other one
        space.let_read(1000)
        assert over(moves) and over(waits)
        assert moves.cause == waits.cause == "" and waits.pages == len(KEYS)


class TestEnds:
    def test_a_load_that_hangs_in_the_store_is_given_up_and_touches_no_block_from_then_on(
        self, mover, space, view, memory, clock
    ):
        space.land(KEYS)
        space.hold_reads()
        hangs, queued = load(view, memory), load(view, memory)
        mover.submit(hangs)
        mover.submit(queued)
        space.wait_for_read()
        assert mover.take_ended() == [] and not mover.hangs
        clock.ahead_s += 1.1 * DEADLINE_S
        assert mover.take_ended() == [hangs, queued] and mover.hangs
        space.let_read(1000)
        wait_for(lambda: not mover.hangs)
        assert mover.stop(PATIENCE_S) and mover.take_ended() == []
        for job in (hangs, queued):
            assert (job.pages, job.cause) == (0, "deadline") and job.seconds > DEADLINE_S
        assert memory.holds(0)

    def test_loads_move_in_turns_and_none_is_late_while_the_other_moves(self, mover, space, view, memory, clock):
        space.land(KEYS)
        space.hold_reads()
        first, second = load(view, memory), load(view, Memory())
        mover.submit(first)
        space.wait_for_read()
        mover.submit(second)
        for number in range(2 * len(KEYS) - 1):
            assert (first.pages, second.pages) == ((number + 1) // 2, number // 2) and mover.take_ended() == []
            clock.ahead_s += 0.8 * DEADLINE_S
            space.let_read()
            space.wait_for_read()
        assert mover.take_ended() == [first]
        space.let_read(1000)
        assert over(second)
        assert mover.take_ended() == [second] and first.cause == second.cause == ""

    def test_a_load_whose_device_is_busy_keeps_no_other_from_its_turn(self, mover, space, view, memory, clock):
        space.land(KEYS)
        passed = []
        fenced = load(view, Memory(), fence=lambda: passed.append("waited"), passed=lambda: bool(passed))
        mover.submit(fenced)
        wait_for(lambda: fenced.begun)
        mover.run(load(view, memory))
        assert memory.holds(len(KEYS)) and fenced.pages == 0 and not fenced.over.is_set()
        passed.append("passed")
        assert over(fenced) and fenced.cause == "" and "waited" in passed

    def test_a_load_whose_device_never_gets_there_ends_at_its_deadline(self, mover, space, view, memory, clock):
        space.land(KEYS)
        job = load(view, memory, fence=lambda: None, passed=lambda: False)
        mover.submit(job)
        wait_for(lambda: job.begun)
        clock.ahead_s += 1.1 * DEADLINE_S
        assert over(job) and (job.pages, job.cause) == (0, "deadline") and memory.holds(0)

    def test_stop_waits_for_a_load_that_has_begun(self, mover, space, view, memory):
        space.land(KEYS)
        space.hold_reads()
        job = load(view, memory)
        mover.submit(job)
        space.wait_for_read()
        assert not mover.stop(0.0)
        space.let_read(1000)
        assert over(job) and job.cause == "" and memory.holds(len(KEYS))

    def test_the_deadline_of_a_save_counts_from_its_submission(self, mover, space, view, memory, clock):
        def copy(number: int, page: Bytes) -> None:
            clock.ahead_s += 0.4 * DEADLINE_S

        job = save(view, memory, copy=copy)
        mover.run(job)
        assert (job.pages, job.cause) == (3, "deadline")
        assert space.contains(KEYS) == [True] * 3 + [False] * 3

    def test_whoever_takes_the_memory_back_waits_for_the_page_that_is_being_copied(self, mover, space, view, memory):
        space.land(KEYS)
        answers = []
        job = load(view, memory, copy=lambda *args: answers.append(job.give_up("taken", wait=False)))
        mover.run(job)
        assert answers == [False] * len(KEYS) and job.cause == ""
        taken = load(view, memory)
        assert taken.give_up("taken") and not taken.give_up("again")
        mover.run(taken)
        assert taken.cause == "taken" and memory.holds(0)

    @pytest.mark.parametrize("make", [load, save])
    def test_an_error_ends_a_job_and_the_next_one_runs(self, mover, space, view, memory, make, caplog):
        def copy(*args: Any) -> None:
            raise OSError("made to fail")

        if make is load:
            space.land(KEYS)
        for _ in range(2):
            job = make(view, memory, copy=copy)
            mover.run(job)
            assert (job.pages, job.cause) == (0, "error")
        job = make(view, memory)
        mover.run(job)
        assert job.cause == "" and caplog.text.count("failed: OSError('made to fail')") == 1

    @pytest.mark.parametrize("make", [load, save])
    def test_without_a_store_or_memory_jobs_end_at_once(self, mover, view, memory, make):
        for job, cause in (
            (make(None, memory), "pool_absent"),
            (make(view, memory, copy=None), "unsupported_blocks"),
            (make(view, memory, keys=[]), ""),
        ):
            mover.run(job)
            assert (job.pages, job.cause) == (0, cause)

    def test_what_was_submitted_before_happens_first(self, mover, space, view, memory):
        space.land(KEYS)
        jobs = [load(view, memory, fence=lambda number=number: order.append(number)) for number in range(20)]
        order: list[int] = []
        for job in jobs:
            mover.submit(job)
        assert over(jobs[-1])
        assert order == list(range(20)) and mover.take_ended() == jobs

    def test_stop_drops_what_has_not_begun_and_a_stopped_mover_starts_again(self, mover, space, view, memory):
        space.land(KEYS)
        space.hold_reads()
        begun, queued = load(view, memory), load(view, memory)
        mover.submit(begun)
        space.wait_for_read()
        mover.submit(queued)
        assert not mover.stop(0.01)
        assert (queued.cause, begun.over.is_set()) == ("stopped", False)
        space.let_read(1000)
        assert over(begun) and begun.cause == ""
        again = load(view, memory)
        mover.run(again)
        assert again.cause == "" and mover.stop(PATIENCE_S)

    def test_stop_ends_a_load_that_waits(self, mover, space, view, memory):
        space.expected = set(KEYS)
        job = load(view, memory)
        mover.submit(job)
        wait_for(lambda: job.begun)
        assert mover.stop(PATIENCE_S) and job.cause == "stopped"

    def test_where_no_thread_can_be_started_jobs_fail(self, mover, view, memory, monkeypatch):
        def start(self: Any) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("threading.Thread.start", start)
        job = load(view, memory)
        mover.submit(job)
        assert mover.take_ended() == [job] and job.cause == "error"


class TestPauses:
    def test_after_a_lock_that_was_not_free_saves_end_at_once_for_a_while(
        self, mover, space, view, memory, clock, monkeypatch
    ):
        memory.fill()
        space.refused = True
        refused = save(view, memory)
        mover.run(refused)
        assert refused.cause == "refused" and not mover.paused
        monkeypatch.setattr(store_client.jobs, "_LOCK_WAIT_S", 0.0)
        for cause in ("busy", "paused"):
            job = save(view, memory)
            mover.run(job)
            assert job.cause == cause and mover.paused
        space.refused = False
        clock.ahead_s += store_client.mover.PAUSE_S
        job = save(view, memory)
        mover.run(job)
        assert job.cause == "" and space.contains(KEYS) == [True] * len(KEYS)


    @pytest.mark.parametrize("make", [load, save])
    def test_a_device_that_fails_copies_in_a_row_is_left_alone_for_a_while(
        self, mover, space, view, memory, clock, make, monkeypatch
    ):
        memory.fill()
        copies = {load: memory.load, save: memory.save}[make]

        ended: list[tuple[str, bool]] = []
        end = store_client.jobs.Job.end
        monkeypatch.setattr(
            store_client.jobs.Job, "end",
            lambda job, cause, **how: (ended.append((cause, mover.paused)), end(job, cause, **how))[1],
        )  # fmt: skip

        def run(copy: Any) -> str:
            if make is load:
                space.land(KEYS)
            else:
                space._pages.clear()
            job = make(view, memory, copy=copy)
            mover.run(job)
            return job.cause

        def fail(*_: Any) -> None:
            raise CopyFailed("out of order")

        assert [run(fail), run(fail), run(copies)] == ["copy", "copy", ""]
        assert [run(fail), run(fail)] == ["copy", "copy"] and not mover.paused, "not in a row"
        assert [run(fail), run(copies)] == ["copy", "paused"] and mover.paused
        assert ended[-2:] == [("copy", True), ("paused", True)], "paused by the time that it is told"
        clock.ahead_s += store_client.mover.PAUSE_S
        assert [run(fail), run(copies)] == ["copy", "paused"], "one try"
        clock.ahead_s += store_client.mover.PAUSE_S
        assert [run(copies), run(fail), run(copies)] == ["", "copy", ""]

    def test_a_load_whose_device_hangs_is_told_from_one_that_moves_pages(self, mover, space, view, memory, clock):
        """It holds memory that it may write to at any time, so it cannot be given up."""
        space.land(KEYS)
        hangs, goes_on = threading.Event(), threading.Event()

        def copy(number: int, part: Shard, page: Bytes) -> None:
            hangs.set()
            assert goes_on.wait(PATIENCE_S)
            memory.load(number, part, page)

        job = load(view, memory, copy=copy)
        mover.submit(job)
        assert hangs.wait(PATIENCE_S) and not mover.stuck
        clock.ahead_s += 1.5 * DEADLINE_S
        assert mover.take_ended() == [] and not mover.stuck
        clock.ahead_s += DEADLINE_S
        assert mover.take_ended() == [] and mover.stuck
        goes_on.set()
        wait_for(job.over.is_set)
        assert mover.take_ended() == [job] and not job.cause
        wait_for(lambda: not mover.stuck)


class TestSaves:
    def test_only_what_the_store_lacks_is_read(self, mover, space, view, memory):
        memory.fill()
        space.land(KEYS[1:3])
        read = []
        job = save(view, memory, copy=lambda number, page: (read.append(number), memory.save(number, page)))
        mover.run(job)
        assert read == [0, 3, 4, 5]
        assert (job.pages, job.stored, job.present) == (6, 4, set(range(6)))
        back = Memory()
        mover.run(load(view, back))
        assert back.holds(len(KEYS))

    def test_pages_whose_memory_was_overtaken_are_left_out_and_the_others_stored(
        self, mover, space, view, memory, monkeypatch
    ):
        monkeypatch.setattr(store_client.jobs, "_MOVE_PAGES", 4)
        lost: set[int] = set()
        monkeypatch.setattr(Save, "lost", lost)

        def copy(number: int, page: Bytes) -> None:
            if number in (2, 4):
                lost.add(number)
                raise Overtaken
            memory.save(number, page)

        job = save(view, memory, copy=copy)
        mover.run(job)
        assert (job.pages, job.stored, job.cause) == (4, 4, "overtaken")
        assert space.contains(KEYS) == [number not in (2, 4) for number in range(6)]

    def test_a_page_that_is_given_up_while_it_is_copied_is_not_stored(self, mover, space, view, memory):
        def copy(number: int, page: Bytes) -> None:
            if number == 2:
                raise GivenUp

        job = save(view, memory, copy=copy)
        mover.submit(job)
        mover.run(save(view, memory, keys=chain("b", 1)))
        assert space.contains(KEYS) == [True, True, False, False, False, False]
        assert job.give_up("deadline") and job.pages == 2
