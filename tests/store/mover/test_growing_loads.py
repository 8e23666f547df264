"""A load of the mover takes pages as they land, and waits for no page that does not come."""

from __future__ import annotations

import pytest
from simulated.waiting import wait_for
from store.mover.moves import DEADLINE_S, KEYS, PATIENCE_S, Memory, load, over

import store_client.jobs
import store_client.mover
from store_client.testing import chain


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

    @pytest.mark.parametrize(("silent", "cause"), [(False, "page_lost"), (True, "not_heard")])
    def test_a_promised_page_of_which_the_store_says_or_hears_nothing_is_lost(
        self, mover, space, view, memory, clock, silent, cause
    ):
        space.sure, space.silent = True, silent
        space.land(KEYS[:2])
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        wait_for(lambda: job.pages == 2)
        clock.ahead_s += store_client.jobs._HEARING_S
        assert over(job) and (job.pages, job.cause) == (2, cause) and memory.holds(2)

    def test_where_nothing_is_heard_of_a_page_that_nobody_promised_it_is_lost(self, mover, space, view, memory):
        space.silent = True
        space.land(KEYS[:2])
        job = load(view, memory)
        mover.run(job)
        assert (job.pages, job.cause) == (2, "page_lost")

    def test_who_said_that_a_page_is_coming_and_says_nothing_any_more_may_bring_it_yet(
        self, mover, space, view, memory
    ):
        space.sure, space.expected = True, set(KEYS)
        space.land(KEYS[:2])
        job = load(view, memory, num_coming=len(KEYS) - 2)
        mover.submit(job)
        wait_for(lambda: job.awaits)
        space.silent = True
        assert over(job) and (job.pages, job.cause) == (2, "not_heard") and memory.holds(2)

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
