"""Each job of the mover ends exactly once and in time, whatever happens to it; after faults in a row it pauses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from simulated.waiting import wait_for
from store.mover.moves import DEADLINE_S, KEYS, PATIENCE_S, Memory, load, over, save

import store_client.jobs
import store_client.mover
from store_client.base import Bytes, Shard
from store_client.jobs import CopyFailed
from store_client.mover import UNWANTED


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

    def test_the_load_behind_one_that_nobody_wants_any_more_is_done(self, mover, space, view, memory, caplog):
        space.land(KEYS)
        space.hold_reads()
        unwanted, behind = load(view, memory), load(view, Memory())
        mover.run(unwanted, lambda: False)
        assert unwanted.cause == UNWANTED and not mover.hangs and UNWANTED not in caplog.text
        mover.submit(behind)
        space.let_read(1000)
        wait_for(behind.over.is_set)
        assert mover.take_ended() == [behind] and behind.pages == len(KEYS)

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
