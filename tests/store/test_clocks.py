"""No clock stops a pool: not one that is set back or forward, not one that another process has."""

import time

import numpy as np
import pytest
from store.audit import audit
from store.pools import inside, space_in

from store_client import EmbeddedStore, Put
from store_client.embedded import table
from store_client.testing import chain, put_chain

HOUR_S = 3600


@pytest.fixture
def store(pool):
    """A pool that is full."""
    with EmbeddedStore(pool, 2 << 20) as store:
        assert set(put_some(store, "before", 20)) == {Put.STORED}
        yield store
        audit(store)


def put_some(store, name, count):
    return [put for i in range(count) for put in put_chain(space_in(store), chain(f"{name} {i}", 3))]


def set_clock(monkeypatch, by_s):
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + by_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(by_s * 1e9))


@pytest.mark.parametrize("steps", [[-HOUR_S], [HOUR_S, -HOUR_S], [HOUR_S, -2 * HOUR_S, HOUR_S], [-1e9]], ids=str)
def test_puts_succeed_whatever_the_clock_does(store, space, monkeypatch, steps):
    for number, by_s in enumerate(steps):
        set_clock(monkeypatch, by_s)
        assert put_some(store, f"after {number}", 20) == [Put.STORED] * 60
        assert space.lookup(chain(f"after {number} 19", 3)).pages == 3
        assert all(info.idle_s < 600 for info in store.namespaces())


def test_uses_that_lie_ahead_spare_no_page(store):
    """As noted by a process in another time namespace, or before a restart that nobody could see."""
    inside(store).table.access[:] = np.uint64(1 << 63)
    assert put_some(store, "after", 20) == [Put.STORED] * 60


def test_what_this_process_used_last_outlives_what_lies_ahead(store, space, monkeypatch):
    """A process whose clock runs behind takes turns with others, instead of losing its pages to theirs at once."""
    ahead = table.now_ns
    monkeypatch.setattr(table, "now_ns", lambda: ahead() + 10**15)
    put_some(store, "ahead", 10)
    monkeypatch.undo()
    assert put_some(store, "after", 3) == [Put.STORED] * 9
    assert space.lookup(chain("after 2", 3)).pages == 3
