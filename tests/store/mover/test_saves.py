"""A save of the mover stores what the pool lacks and what is still its request's."""

from __future__ import annotations

from store.mover.moves import KEYS, Memory, load, save

import store_client.jobs
import store_client.mover
from store_client.base import Bytes
from store_client.jobs import GivenUp, Overtaken, Save
from store_client.testing import chain


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
