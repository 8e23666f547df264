"""Pages that a device writes: begun one after the other, some at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store.audit import audit
from store.pools import CAPACITY, inside, space_in

import store_client.embedded.putting as module
from store_client import EmbeddedStore, Put, Space, jobs
from store_client.base import Bytes
from store_client.embedded import hashing
from store_client.embedded.locks import LockTimeout
from store_client.embedded.put import PutPages, PutPlan
from store_client.embedded.space import EmbeddedSpace
from store_client.jobs import Overtaken, Save
from store_client.mover import Mover
from store_client.sharded import ShardView
from store_client.testing import PAGE_NBYTES, SHARD, chain, get_page, namespace, page_bytes, parents_of

PATIENCE_S = 60.0


def begin_chain(space: Space, keys: Sequence[bytes], settle: Callable[[int], None] = lambda count: None) -> list[Put]:
    """Pages that are written as soon as they are begun."""

    def fill(i: int, view: Bytes) -> None:
        view[:] = page_bytes(keys[i])

    return space.write(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=PATIENCE_S, settle=settle)


def are_right(space: Space, keys: Sequence[bytes]) -> bool:
    found = {key: get_page(space, key) for key in keys}
    return all(page is not None and np.array_equal(page, page_bytes(key)) for key, page in found.items())


def reserved(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages are put at a time from now on."""
    counts: list[int] = []
    writer = inside(store).writer
    reserve = writer.reserve
    monkeypatch.setattr(writer, "reserve", lambda pages, at: (counts.append(len(pages.keys)), reserve(pages, at))[1])
    return counts


def test_a_device_gets_more_pages_at_a_time_once_the_pool_has_memory_for_them(store, space, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_NBYTES", 2 * PAGE_NBYTES)
    monkeypatch.setattr(module, "_BEGUN_NBYTES", 4 * PAGE_NBYTES)
    counts, keys = reserved(store, monkeypatch), chain("a", 11)
    settled: list[int] = []
    assert begin_chain(space, keys, lambda count: settled.append(len(counts))) == [Put.STORED] * 11
    assert counts == [2, 4, 4, 1], "the first are those for which the arena grows"
    assert settled == [2, 3, 4, 4] and are_right(space, keys)


@pytest.mark.parametrize(
    "secured, used, reserved, pages",
    [(0, 0, 0, 64), (100, 36, 0, 64), (300, 70, 0, 230), (300, 20, 50, 230), (5000, 100, 0, 256)],
)
def test_while_the_pool_grows_a_device_gets_what_there_is_memory_for(secured, used, reserved, pages):
    mib = 1 << 20
    granule = module.GRANULE
    arena = SimpleNamespace(limit=(32 << 30) // granule, secured_nbytes=secured * mib)
    pool = SimpleNamespace(arena=arena, table=SimpleNamespace(used_granules=used * mib // granule))
    assert module.ByDevice(print, print).batch(pool, mib, reserved * mib) == pages


def test_a_device_gets_no_more_than_a_32nd_of_a_pool_at_a_time(store, space, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_NBYTES", PAGE_NBYTES)
    begin_chain(space, chain("grow", 1))
    counts = reserved(store, monkeypatch)
    most = CAPACITY // 32 // PAGE_NBYTES
    assert begin_chain(space, chain("a", 2 * most + 1)) == [Put.STORED] * (2 * most + 1)
    assert counts == [most, most, 1] and most > 1


def test_where_no_thread_can_be_started_pages_are_hashed_all_the_same(space, monkeypatch):
    def refuse(most: int) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hashing, "_started", refuse)
    keys = chain("a", 4)
    assert begin_chain(space, keys) == [Put.STORED] * 4 and are_right(space, keys)


def test_each_batch_that_got_the_lock_gives_the_next_one_as_long(store, space, monkeypatch):
    """Of ranks that secure memory for a pool that grows, each waits for all others again and again."""
    monkeypatch.setattr(module, "_BATCH_NBYTES", PAGE_NBYTES)
    writer, ahead_s = inside(store).writer, 0.0
    reserve = writer.reserve

    def wait_long(pages: PutPages, deadline: float) -> PutPlan:
        nonlocal ahead_s
        ahead_s += 0.6 * PATIENCE_S
        if time.monotonic() + ahead_s > deadline:
            raise LockTimeout
        return reserve(pages, deadline)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s))
    monkeypatch.setattr(writer, "reserve", wait_long)
    assert begin_chain(space, chain("a", 4)) == [Put.STORED] * 4


def test_what_was_stored_before_a_page_was_overtaken_counts_and_is_read_once(store, space, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_NBYTES", 2 * PAGE_NBYTES)
    lost: set[int] = set()
    monkeypatch.setattr(Save, "lost", lost)
    keys, read = chain("a", 6), []

    def copy(number: int, page: Bytes) -> None:
        read.append(number)
        if number == 4:
            lost.add(number)
            raise Overtaken
        page[:] = page_bytes(keys[number])

    view, mover, now_s = ShardView(store, namespace(), SHARD, PAGE_NBYTES // 8), Mover[Save]("save"), time.monotonic()
    job = Save(
        keys=keys, parent=None, view=lambda: view, deadline_s=PATIENCE_S, copy=copy, submitted_s=now_s, since_s=now_s
    )
    mover.run(job)
    mover.stop(PATIENCE_S)
    assert (job.pages, job.stored, job.cause) == (5, 5, "overtaken") and job.present == {0, 1, 2, 3, 5}
    assert read == [0, 1, 2, 3, 4, 5]


def test_what_other_threads_store_meanwhile_is_stored_and_nothing_of_a_batch_that_failed(store, monkeypatch):
    """Neither holds what the other has reserved."""
    mine, other = space_in(store, "mine"), space_in(store, "other")
    keys, others = chain("a", 4), chain("b", 4)

    def settle(count: int) -> None:
        assert begin_chain(other, others) == [Put.STORED] * 4
        raise RuntimeError("broken device")

    with pytest.raises(RuntimeError, match="broken device"):
        begin_chain(mine, keys, settle)
    assert mine.contains(keys) == [False] * 4 and are_right(other, others)
    audit(store)


class Steps:
    """A device that writes pages when they are settled, and a pool that publishes: what happens in which order.

    `fails`: what raises instead, as (step, its number among all such steps).
    """

    def __init__(self, store: EmbeddedStore, space: Space, monkeypatch: pytest.MonkeyPatch, pages: int = 4) -> None:
        monkeypatch.setattr(module, "_BATCH_NBYTES", pages * PAGE_NBYTES)
        monkeypatch.setattr(module, "_BEGUN_NBYTES", pages * PAGE_NBYTES)
        self.space, self.writer = space, inside(store).writer
        self.seen: list[str] = []
        self.fails: dict[tuple[str, int], BaseException] = {}
        self.begun: list[tuple[bytes, Bytes]] = []
        self.meanwhile: Callable[[], object] = lambda: None
        """Done while the first batch is written."""
        for step, name in (("reserve", "reserve"), ("publish", "_publish"), ("abandon", "abandon")):
            monkeypatch.setattr(self.writer, name, self._noted(step, getattr(self.writer, name)))

    def _noted(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.note(step)
            return call(*arguments)

        return noted

    def note(self, step: str) -> None:
        self.seen.append(step)
        if error := self.fails.get((step, self.seen.count(step))):
            raise error

    def write(self, keys: Sequence[bytes], parent: bytes | None = None) -> list[Put]:
        def fill(i: int, view: Bytes) -> None:
            self.note("fill")
            if i == 0:
                self.meanwhile()
            self.begun.append((keys[i], view))

        def settle(count: int) -> None:
            settled, self.begun[:count] = self.begun[:count], []
            for key, view in settled:
                view[:] = page_bytes(key)
            self.note("settle")

        parents = [parent, *keys[:-1]]
        return self.space.write(
            keys, fill, nbytes=PAGE_NBYTES, parents=parents, deadline_s=PATIENCE_S, settle=settle
        )


@pytest.fixture
def steps(store, space, monkeypatch):
    return Steps(store, space, monkeypatch)


FILLED = ["fill"] * 2


def test_a_batch_is_published_while_the_next_one_is_written_and_before_the_third_is_reserved(store, space, steps):
    keys = chain("a", 12)
    assert steps.write(keys) == [Put.STORED] * 12
    first, last = ["reserve", *FILLED, *FILLED], ["settle", "publish"]
    overlapped = ["reserve", *FILLED, "settle", "publish", *FILLED]
    assert steps.seen == [*first, *overlapped, *overlapped, *last]
    assert are_right(space, keys)
    audit(store)


@pytest.mark.parametrize("fails, stored", [(("fill", 5), 0), (("fill", 6), 0), (("fill", 8), 4)])
def test_after_a_fault_of_who_writes_nothing_is_published_also_of_the_batch_before(store, space, steps, fails, stored):
    """A device that fails of one page may have failed of those before."""
    keys, error = chain("a", 8), RuntimeError("broken source")
    steps.fails[fails] = error
    with pytest.raises(RuntimeError, match="broken source"):
        steps.write(keys)
    assert not steps.begun, "nothing is written any more"
    assert space.contains(keys) == [True] * stored + [False] * (8 - stored) and are_right(space, keys[:stored])
    assert store.stats().stored_pages == stored and not store.stats().failures
    audit(store)


@pytest.mark.parametrize("step", ["reserve", "publish"])
def test_a_fault_of_the_pool_costs_the_batch_that_it_is_in(store, space, steps, step):
    keys = chain("a", 8)
    steps.fails[step, 2] = RuntimeError("broken pool")
    assert steps.write(keys) == [Put.STORED] * 4 + [Put.FAILED] * 4
    assert not steps.begun
    assert space.contains(keys) == [True] * 4 + [False] * 4 and are_right(space, keys[:4])
    assert store.stats().stored_pages == 4 and store.stats().failures == {"error": 4}
    audit(store)


def test_where_a_batch_is_not_written_the_one_that_was_begun_behind_it_is_not_stored_either(store, space, steps):
    """And no place is given back before all is over that a device was told to write."""
    keys = chain("a", 12)
    steps.fails["settle", 2] = RuntimeError("broken device")
    with pytest.raises(RuntimeError, match="broken device"):
        steps.write(keys)
    assert space.contains(keys) == [True] * 4 + [False] * 8 and not steps.begun
    assert steps.seen[-4:] == ["settle", "abandon", "settle", "abandon"]
    audit(store)


def test_in_a_full_pool_a_batch_makes_room_but_not_where_the_chain_of_the_one_before_is(store, space, steps):
    """What it hangs on is not there yet, and others use all that would be older."""
    keys, older, other = chain("a", 16), chain("older", CAPACITY // PAGE_NBYTES - 8), space_in(store, "older")
    assert begin_chain(space, keys[:8]) == [Put.STORED] * 8
    assert begin_chain(other, older) == [Put.STORED] * len(older)
    steps.meanwhile = lambda: other.read(older, lambda i, view: None, nbytes=PAGE_NBYTES)
    assert steps.write(keys[8:], keys[7]) == [Put.STORED] * 8
    assert are_right(space, keys)
    audit(store)


def test_a_lock_that_is_not_free_costs_what_waits_for_it_and_is_not_waited_for_again(store, space, steps, monkeypatch):
    keys = chain("a", 12)
    steps.fails["reserve", 2] = steps.fails["reserve", 3] = LockTimeout()
    waits_s: list[float] = []
    commit = steps.writer.commit

    def commit_within(plan: PutPlan, deadline: float) -> dict[int, str]:
        waits_s.append(deadline - time.monotonic())
        return commit(plan, deadline)

    monkeypatch.setattr(steps.writer, "commit", commit_within)
    assert steps.write(keys) == [Put.STORED] * 4 + [Put.FAILED] * 8
    assert waits_s[0] <= 0 and store.stats().failures == {"busy": 8}
    assert are_right(space, keys[:4])
    audit(store)


@pytest.mark.parametrize("fails", [("reserve", 1), ("fill", 1)])
def test_behind_a_batch_that_is_not_coming_pages_take_free_space_only(store, space, steps, monkeypatch, fails):
    """Nobody would find them, and others would be gone for them."""
    others = chain("older", CAPACITY // PAGE_NBYTES)
    assert begin_chain(space_in(store, "older"), others) == [Put.STORED] * len(others)
    steps.seen.clear()
    if fails[0] == "fill":  # by a fault of the pool's
        monkeypatch.setattr(module.ByDevice, "begin", broken_once(module.ByDevice.begin))
    else:
        steps.fails[fails] = OSError("broken pool")
    before = store.stats().evicted_pages
    assert steps.write(chain("a", 8)) == [Put.FAILED] * 8
    assert store.stats().evicted_pages - before == (4 if fails[0] == "fill" else 0)
    audit(store)


def broken_once(begin: Callable[..., None]) -> Callable[..., None]:
    left = [OSError("broken pool")]

    def broken(way: Any, at: int, pool: Any, plan: PutPlan, publish: Callable[[], None]) -> None:
        if left:
            way._begun.append([])
            raise left.pop()
        begin(way, at, pool, plan, publish)

    return broken


def test_what_ends_a_save_while_it_fails_leaves_nothing_reserved_and_nothing_that_is_written(store, space, steps):
    keys = chain("a", 8)
    steps.fails["fill", 5], steps.fails["settle", 1] = RuntimeError("broken source"), KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        steps.write(keys)
    assert not steps.begun and steps.seen[-2:] == ["settle", "abandon"]
    assert space.contains(keys) == [False] * 8
    audit(store)


def test_what_became_of_a_batch_is_told_of_its_own_pages_also_where_it_could_not_be_counted(
    store, space, steps, monkeypatch
):
    count, fails = EmbeddedSpace._count, [OSError("broken pool")]

    def count_later(*arguments: Any) -> None:
        if fails:
            raise fails.pop()
        count(*arguments)

    monkeypatch.setattr(EmbeddedSpace, "_count", count_later)
    keys = chain("a", 12)
    outcome = steps.write(keys)
    assert outcome[:4] == [Put.STORED] * 4
    assert [put is not Put.FAILED for put in outcome] == space.contains(keys)


class BegunSave(Save):
    @property
    def settle(self) -> Callable[[int], None]:
        return lambda count: None


def test_a_save_that_waited_for_the_lock_in_vain_is_busy_although_others_of_it_were_settled_since(store, monkeypatch):
    """Who is busy is left alone for a while."""
    monkeypatch.setattr(module, "_BATCH_NBYTES", 2 * PAGE_NBYTES)
    monkeypatch.setattr(module, "_BEGUN_NBYTES", 2 * PAGE_NBYTES)
    monkeypatch.setattr(jobs, "_LOCK_WAIT_S", 0.01)
    writer, keys = inside(store).writer, chain("a", 4)
    reserve = writer.reserve

    def reserve_once(pages: PutPages, deadline: float) -> PutPlan:
        if keys[0] in pages.keys:
            return reserve(pages, time.monotonic() + PATIENCE_S)
        time.sleep(0.02)
        raise LockTimeout

    monkeypatch.setattr(writer, "reserve", reserve_once)

    def copy(number: int, page: Bytes) -> None:
        page[:] = page_bytes(keys[number])

    view, mover = ShardView(store, namespace(), SHARD, PAGE_NBYTES // 8), Mover[Save]("save")
    job = BegunSave(keys=keys, parent=None, view=lambda: view, deadline_s=PATIENCE_S, copy=copy)
    mover.run(job)
    mover.stop(PATIENCE_S)
    assert job.cause == "busy" and job.present <= {0, 1}
