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

import store_client.embedded.space as module
from store_client import EmbeddedStore, Put, Space
from store_client.base import Bytes
from store_client.embedded import hashing
from store_client.embedded.locks import LockTimeout
from store_client.embedded.put import PutPages, PutPlan
from store_client.jobs import Overtaken, Save
from store_client.mover import Mover
from store_client.sharded import ShardView
from store_client.testing import PAGE_NBYTES, SHARD, chain, get_page, namespace, page_bytes, parents_of

PATIENCE_S = 60.0


def begin_chain(space: Space, keys: Sequence[bytes], settle: Callable[[], None] = lambda: None) -> list[Put]:
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
    assert begin_chain(space, keys, lambda: settled.append(len(counts))) == [Put.STORED] * 11
    assert counts == [2, 4, 4, 1], "the first are those for which the arena grows"
    assert settled == [1, 2, 3, 4] and are_right(space, keys)


@pytest.mark.parametrize("secured, used, pages", [(0, 0, 64), (100, 36, 64), (400, 100, 300), (5000, 100, 1024)])
def test_while_the_pool_grows_a_device_gets_what_there_is_memory_for(secured, used, pages):
    mib = 1 << 20
    granule = module.GRANULE
    arena = SimpleNamespace(limit=(32 << 30) // granule, secured_nbytes=secured * mib)
    pool = SimpleNamespace(arena=arena, table=SimpleNamespace(used_granules=used * mib // granule))
    assert module._begun_batch(pool, mib) == pages


def test_a_device_gets_no_more_than_a_16th_of_a_pool_at_a_time(store, space, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_NBYTES", PAGE_NBYTES)
    begin_chain(space, chain("grow", 1))
    counts = reserved(store, monkeypatch)
    most = CAPACITY // 16 // PAGE_NBYTES
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

    def settle() -> None:
        assert begin_chain(other, others) == [Put.STORED] * 4
        raise RuntimeError("broken device")

    with pytest.raises(RuntimeError, match="broken device"):
        begin_chain(mine, keys, settle)
    assert mine.contains(keys) == [False] * 4 and are_right(other, others)
    audit(store)
