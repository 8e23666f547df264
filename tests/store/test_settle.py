"""Reads and writes that are begun page by page and settled at once, as a device does them: `settle` of `Space`."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import xxhash
from store.pools import CAPACITY, fragment, garble, inside, space_in
from store.shard_model import Model, Pool, Reader

from mooncake_connector.kv.geometry import Shard
from store_client import Put
from store_client.embedded import hashing, putting
from store_client.testing import (
    DEADLINE_S,
    PAGE_NBYTES,
    chain,
    get_page,
    page_bytes,
    parents_of,
    put_chain,
)


@pytest.fixture(autouse=True, params=[1, 4], ids=["one thread", "four threads"])
def num_threads(request, monkeypatch):
    monkeypatch.setattr(hashing, "num_threads", lambda: request.param)
    return request.param


class Device:
    """Reads and writes what it was told to when it is settled, and not before."""

    def __init__(self, keys):
        self.keys, self.begun, self.read, self.settled = keys, {}, {}, 0

    def begin(self, i, view):
        self.begun[i] = view

    def take(self):
        self.settled += 1
        self.read.update({i: view.copy() for i, view in self.begun.items()})
        self.begun.clear()

    def give(self, count):
        self.settled += 1
        for i in list(self.begun)[:count]:
            view = self.begun.pop(i)
            view[:] = page_bytes(self.keys[i], len(view))

    def is_right(self, i):
        return np.array_equal(self.read[i], page_bytes(self.keys[i]))


def write(space, keys, nbytes=PAGE_NBYTES):
    device = Device(keys)
    outcome = space.write(
        keys, device.begin, nbytes=nbytes, parents=parents_of(keys), deadline_s=DEADLINE_S, settle=device.give
    )
    assert not device.begun
    return outcome, device.settled


def read(space, keys, nbytes=PAGE_NBYTES):
    device = Device(keys)
    return space.read(keys, device.begin, nbytes=nbytes, settle=device.take), device


def test_a_page_that_goes_before_all_is_settled_is_a_miss(space):
    keys = chain("a", 4)
    put_chain(space, keys)
    device = Device(keys)

    def settle():
        device.take()
        space.remove(keys[1:2])
        space.remove(keys[3:])
        put_chain(space, keys[3:])

    assert space.read(keys, device.begin, nbytes=PAGE_NBYTES, settle=settle) == [True, False, True, False]
    assert device.is_right(0) and device.is_right(2)


def test_a_wrong_page_among_others_is_a_miss_and_is_forgotten(store, space):
    keys = chain("a", 4)
    put_chain(space, keys)
    arena = next(store.path.glob("*/arena"))
    garble(arena, arena.read_bytes().index(page_bytes(keys[2]).tobytes()) + 77, b"wrong")
    found, device = read(space, keys)
    assert found == [True, True, False, True]
    assert [i for i in device.read if device.is_right(i)] == [0, 1, 3]
    inside(store).writer.settle(time.monotonic() + 60)  # which the thread that drops such pages may be doing right now
    assert space.contains(keys) == [True, True, False, True]
    assert store.stats().failures["corrupt"] == 1


def test_pages_in_pieces_are_settled_as_well(store, space):
    fragment(store)
    keys = chain("a", 8)
    assert write(space, keys) == ([Put.STORED] * 8, 1)
    assert not [key for key in keys if not np.array_equal(get_page(space, key), page_bytes(key))]
    pages = [page for _, page in inside(store).reader._find(keys, space._number, PAGE_NBYTES)]
    assert min(page.row.num_extents for page in pages) > 1
    found, device = read(space, keys)
    assert found == [True] * 8 and all(device.is_right(i) for i in range(8))


def test_each_batch_of_a_write_is_settled_before_the_next_is_begun(space, monkeypatch):
    monkeypatch.setattr(putting, "_BATCH_PAGES", 3)
    keys = chain("a", 7)
    assert write(space, keys) == ([Put.STORED] * 7, 3)
    found, device = read(space, keys)
    assert (found, device.settled) == ([True] * 7, 1)


def test_space_is_given_to_nobody_before_a_write_that_failed_is_settled(store, space):
    """A device may still write into it."""
    device, keys = Device(chain("a", 3)), chain("a", 3)
    others = chain("b", CAPACITY // PAGE_NBYTES)  # more than there is room for
    stored_elsewhere = []

    def fill(i, view):
        device.begin(i, view)
        if i == 2:
            raise RuntimeError("broken source")

    def settle(count):
        put_chain(space_in(store, "other"), others)
        device.give(count)
        stored_elsewhere.extend(space_in(store, "other").contains(others))

    with pytest.raises(RuntimeError, match="broken source"):
        space.write(keys, fill, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S, settle=settle)
    assert any(stored_elsewhere)
    report = store.verify()
    assert (report.pages, report.corrupt) == (sum(stored_elsewhere), 0)
    assert space.contains(keys) == [False] * 3


def test_what_was_begun_is_settled_when_the_pool_fails(store, space, monkeypatch):
    keys = chain("a", 3)
    put_chain(space, keys)
    device = Device(keys)
    reader = inside(store).reader
    pieces = reader.pieces

    def fail(found):
        if found.row.key == keys[2]:
            raise OSError("a broken disk")
        return pieces(found)

    monkeypatch.setattr(reader, "pieces", fail)
    assert space.read(keys, device.begin, nbytes=PAGE_NBYTES, settle=device.take) == [False] * 3
    assert device.settled == 1
    assert store.stats().failures["error"] == 1


def digest_of(key):
    return hashing.digest(page_bytes(key))


def test_digests_that_were_taken_on_the_way_are_held_against_the_checksums(store, space):
    keys = chain("a", 5)
    put_chain(space, keys[:4])
    taken = [digest_of(keys[0]), 77, None, digest_of(keys[3])]
    assert space.read(keys, lambda i, view: None, nbytes=PAGE_NBYTES, settle=lambda: taken) == [
        True, False, True, True, False,
    ]  # fmt: skip
    inside(store).writer.settle(time.monotonic() + 60)  # the thread that drops the page moves the counts
    assert store.stats().failures["corrupt"] == 1


def test_digests_that_were_taken_on_the_way_are_the_checksums(store, space):
    keys = chain("a", 4)
    device, taken = Device(keys), [digest_of(keys[0]), 77, None, digest_of(keys[3])]

    def settle(count):
        device.give(count)
        return taken

    outcome = space.write(
        keys, device.begin, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S, settle=settle
    )
    assert outcome == [Put.STORED] * 4
    assert [get_page(space, key) is not None for key in keys] == [True, False, True, True], "77 is that of no page"


@pytest.mark.parametrize("taken", [[], [1, 2, 3]])
def test_digests_of_other_pages_than_those_that_were_begun_are_an_error_of_the_callers(store, space, taken):
    keys = chain("a", 2)
    put_chain(space, keys[:1])
    with pytest.raises(ValueError, match=f"{len(taken)} digests for 1 pages"):
        space.read(keys, lambda i, view: None, nbytes=PAGE_NBYTES, settle=lambda: taken)
    with pytest.raises(ValueError, match=f"{len(taken)} digests for 1 pages"):
        space.write(
            keys, lambda i, view: None, nbytes=PAGE_NBYTES, parents=parents_of(keys), deadline_s=DEADLINE_S,
            settle=lambda count: taken,
        )  # fmt: skip
    assert space.contains(keys) == [True, False]
    assert put_chain(space, keys[1:]) == [Put.STORED]


def test_every_shard_that_pages_are_shown_of_is_settled(store):
    model = Model(8, 4)
    pool = Pool(store, model)
    halves = [Shard(0, 8, 0, 2), Shard(0, 8, 2, 4)]
    whole = Shard(0, 8, 0, 4)
    pool.put(whole, [0])
    for half in halves:
        pool.put(half, [1, 2])
    reader, begun, settled = Reader(model, whole), [], []

    def settle():
        settled.append({part for _, part, _ in begun})
        for read in begun:
            reader.consume(*read)
        begun.clear()

    view = pool.view(whole)
    found = view.read(model.keys[:4], lambda *read: begun.append(read), settle=settle)
    assert found == [True, True, True, False]
    assert settled[0] == {whole} and sorted(settled[1:], key=str) == sorted([{half} for half in halves], key=str)
    assert all(np.array_equal(reader.page(i), reader.expected(i)) for i in range(3))


# The threads that hash


PAGES = [np.full(100, number, dtype=np.uint16).view(np.uint8) for number in range(300)]
DIGESTS = [xxhash.xxh3_64_intdigest(page.data) for page in PAGES]


def test_digests_come_in_order():
    assert hashing.digests_of(PAGES) == DIGESTS and hashing.digests_of([]) == []


def test_several_pages_are_hashed_at_once_where_there_are_threads(num_threads, monkeypatch):
    inside_of, most = threading.Semaphore(0), []

    def slow(page):
        most.append(threading.current_thread())
        inside_of.release()
        if num_threads > 1:
            assert inside_of.acquire(timeout=DEADLINE_S)
        return 0

    monkeypatch.setattr(hashing, "digest", slow)
    assert hashing.digests_of(PAGES) == [0] * len(PAGES)
    assert (threading.current_thread() in most) == (num_threads == 1) and len(set(most)) <= num_threads


def test_a_process_that_can_start_no_thread_hashes_by_itself(monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(hashing, "_threads", None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert hashing.digests_of(PAGES) == DIGESTS


def test_a_forked_child_hashes_with_threads_of_its_own():
    assert hashing.digests_of(PAGES) == DIGESTS
    with hashing._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            right = False
            try:
                right = hashing.digests_of(PAGES) == DIGESTS
            finally:
                os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_thread_serves_two_cores_and_there_are_at_most_eight(monkeypatch):
    monkeypatch.undo()
    counts = []
    for cores in (1, 2, 3, 4, 8, 16, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, cores=cores: set(range(cores)))
        counts.append(hashing.num_threads())
    assert counts == [1, 1, 1, 2, 4, 8, 8]
