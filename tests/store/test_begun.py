"""Pages that a device writes: begun one after the other, and hashed by other threads once they are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from store.audit import audit
from store.pools import CAPACITY, fragment, inside, space_in

import store_client.embedded.space as module
from store_client import EmbeddedStore, Put, Space
from store_client.base import Bytes
from store_client.embedded import hashing
from store_client.testing import PAGE_NBYTES, chain, get_page, page_bytes, parents_of

PATIENCE_S = 60.0


def begin_chain(space: Space, keys: Sequence[bytes], settle: Callable[[], None] = lambda: None) -> list[Put]:
    """Pages that are written as soon as they are begun."""
    filled = 0

    def fill(i: int, view: Bytes) -> int:
        nonlocal filled
        filled += 1
        view[:] = page_bytes(keys[i])
        return filled

    def end() -> None:
        nonlocal filled
        filled = 0
        settle()

    return space.write(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=PATIENCE_S, settle=end)


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


def test_a_device_gets_no_more_than_a_16th_of_a_pool_at_a_time(store, space, monkeypatch):
    monkeypatch.setattr(module, "_BATCH_NBYTES", PAGE_NBYTES)
    begin_chain(space, chain("grow", 1))
    counts = reserved(store, monkeypatch)
    most = CAPACITY // 16 // PAGE_NBYTES
    assert begin_chain(space, chain("a", 2 * most + 1)) == [Put.STORED] * (2 * most + 1)
    assert counts == [most, most, 1] and most > 1


def test_space_is_given_back_once_no_thread_hashes_what_is_in_it(store, space, monkeypatch):
    """Of a page in several places hashing also puts it there."""
    fragment(store)
    order: list[str] = []
    hashing_began, failed = threading.Event(), threading.Event()
    digest, abandon = hashing.digest, inside(store).writer.abandon
    keys = chain("a", 4)

    def digest_late(page: Bytes) -> int:
        hashing_began.set()
        assert failed.wait(PATIENCE_S)
        time.sleep(0.05)  # in which space would be given back by who does not wait
        order.append("hashed")
        return digest(page)

    def fill(i: int, view: Bytes) -> int:
        if i == 1:
            assert hashing_began.wait(PATIENCE_S)
            failed.set()
            raise RuntimeError("broken source")
        view[:] = page_bytes(keys[i])
        return 1

    monkeypatch.setattr(module, "digest", digest_late)
    monkeypatch.setattr(inside(store).writer, "abandon", lambda held: (order.append("given back"), abandon(held)))
    with pytest.raises(RuntimeError, match="broken source"):
        space.write(
            keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=PATIENCE_S, settle=lambda: None
        )
    assert order == ["hashed", "given back"]
    monkeypatch.undo()
    assert space.contains(keys) == [False] * 4
    assert begin_chain(space, keys) == [Put.STORED] * 4 and are_right(space, keys)
    audit(store)


def test_where_no_thread_can_be_started_pages_are_hashed_all_the_same(space, monkeypatch):
    def refuse(most: int) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hashing, "_started", refuse)
    keys = chain("a", 4)
    assert begin_chain(space, keys) == [Put.STORED] * 4 and are_right(space, keys)


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
