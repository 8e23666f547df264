"""A clear takes the lock for a few pages at a time, and others write in between."""

from collections.abc import Callable
from typing import Any

import pytest
from store.audit import audit
from store.pools import inside, space_in

from store_client import EmbeddedStore, Put
from store_client.embedded import writer
from store_client.testing import chain, put_chain

MANY = 50


class Contended:
    """The write lock, which others always get first: they do `work` in the meantime, given how often that was."""

    def __init__(self, lock: Any, work: Callable[[int], object]) -> None:
        self._lock, self._work = lock, work
        self.times, self._inside = 0, False

    def acquire(self, deadline: float) -> None:
        if not self._inside:
            self._inside = True
            self._work(self.times)
            self.times += 1
            self._inside = False
        self._lock.acquire(deadline)

    def release(self) -> None:
        self._lock.release()


@pytest.fixture
def contend(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], Contended]:
    monkeypatch.setattr(writer, "FORGET_BATCH", 2)
    mine = inside(store).writer

    def contend(work: Callable[[int], object]) -> Contended:
        monkeypatch.setattr(mine, "_lock", Contended(mine._lock, work))
        return mine._lock

    return contend


def test_a_clear_ends_however_much_is_stored_meanwhile(store, space, contend):
    keys = chain("a", 10)
    put_chain(space, keys, 4096)

    def store_more(times: int) -> None:
        assert times < MANY, "it goes after what was not there when it began"
        put_chain(space, chain(f"{times}", 3), 4096)

    contended = contend(store_more)
    assert space.clear() >= len(keys)
    assert not any(space.contains(keys))
    assert contended.times > len(keys) // 2
    audit(store)


def test_a_clear_takes_nothing_that_others_put_where_its_pages_were(store, space, contend):
    keys, other = chain("a", 10), space_in(store, "other")
    put_chain(space, keys, 4096)
    theirs = chain("b", 10)

    def take_their_places(times: int) -> None:
        if times == 2:
            space.remove(keys)
            assert put_chain(other, theirs, 4096) == [Put.STORED] * 10

    contend(take_their_places)
    space.clear()
    assert other.contains(theirs) == [True] * 10
    audit(store)


def test_pages_go_before_those_that_they_hang_on(store, space, contend):
    """So that one that is cut short leaves no page that nobody can find."""
    keys = chain("a", 10)
    put_chain(space, keys, 4096)

    def is_a_chain(times: int) -> None:
        assert space.lookup(keys).pages == sum(space.contains(keys))

    contend(is_a_chain)
    assert space.clear() == 10
