"""A look at a pool's figures from outside."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
from store.pools import inside, running, space_in

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore
from store_client.embedded import glance, owners, pool_users
from store_client.embedded.glance import Glances
from store_client.testing import chain, get_page, put_chain


def test_it_is_what_the_pool_says_of_itself(pool, store, space):
    keys = chain("a", 3)
    put_chain(space, keys)
    get_page(space, keys[0])
    space.record_lookup(hit_pages=2, missed_pages=1, page_tokens=64)
    _, seen = Glances(pool).look()
    assert seen == store.stats() and (seen.pages, seen.hit_tokens, seen.read_pages) == (3, 128, 1)


def test_who_looks_is_no_user_and_writes_nothing(pool, store, space):
    put_chain(space, chain("a", 1))
    there = {file: file.stat().st_mtime_ns for file in pool.rglob("*")}
    Glances(pool).look()
    assert {file: file.stat().st_mtime_ns for file in pool.rglob("*")} == there
    assert pool_users(pool) == []


def test_what_a_process_has_counted_and_not_handed_over_is_in_it(pool, store, space):
    counting = "space.record_lookup(hit_pages=5, missed_pages=1, page_tokens=64); print('counted', flush=True)\n"
    with running(counting + "sys.stdin.read()", pool, "-"):
        assert Glances(pool).look()[1].hit_tokens == 320


@pytest.mark.parametrize("who", ["the pool", "a glance"])
def test_what_is_handed_over_while_somebody_looks_is_there_once(pool, store, space, monkeypatch, who):
    """Between the two places that are read, and while it is in neither."""
    space.record_lookup(hit_pages=5, missed_pages=1, page_tokens=64)
    settled, counts = [], owners.waiting_counts

    def handed_over_before(folder, owner=None):
        if not settled:
            settled.append(None)
            inside(store).writer.settle(time.monotonic() + 60)
        return counts(folder, owner)

    monkeypatch.setattr(owners, "waiting_counts", handed_over_before)
    monkeypatch.setattr(glance, "waiting_counts", handed_over_before)
    stats = store.stats() if who == "the pool" else Glances(pool).look()[1]
    assert settled and stats.hit_tokens == 320


def test_who_looks_waits_while_counts_are_in_neither_place(pool, store, space, monkeypatch):
    space.record_lookup(hit_pages=5, missed_pages=1, page_tokens=64)
    table, seen, waits, is_over = inside(store).table, [], threading.Event(), threading.Event()
    looking = threading.Thread(target=lambda: seen.append(Glances(pool).look()[1].hit_tokens))
    add = table.add_counters

    def wait(seconds: float) -> None:
        waits.set()
        assert is_over.wait(60)

    def add_once_somebody_waits(deltas: dict[str, int]) -> None:
        looking.start()
        waits.wait(10)
        add(deltas)

    monkeypatch.setattr(glance, "time", SimpleNamespace(sleep=wait))
    monkeypatch.setattr(table, "add_counters", add_once_somebody_waits)
    inside(store).writer.settle(time.monotonic() + 60)
    is_over.set()
    looking.join(60)
    assert seen == [320]


def test_no_counter_falls_where_a_process_was_killed_while_it_handed_counts_over(pool, store, space, monkeypatch):
    glances = Glances(pool)
    space.record_lookup(hit_pages=5, missed_pages=1, page_tokens=64)
    assert glances.look()[1].hit_tokens == 320
    monkeypatch.setattr(glance, "waiting_counts", lambda folder: {})
    assert glances.look()[1].hit_tokens == 320 and Glances(pool).look()[1].hit_tokens == 0


def test_another_pool_in_its_place_is_told_apart_and_counts_anew(pool):
    glances = Glances(pool)
    with EmbeddedStore(pool, 4 << 20) as store:
        put_chain(space_in(store), chain("a", 3))
        first, seen = glances.look()
        assert seen.stored_pages == 3
    (pool / "pool.json").unlink()
    with pytest.raises(PoolError, match="there is no pool in"):
        glances.look()
    with EmbeddedStore(pool, 4 << 20):
        second, seen = glances.look()
    assert second != first and seen.stored_pages == 0


def test_a_pool_of_another_format_is_an_error_that_says_so(pool, store):
    description = json.loads((pool / "pool.json").read_text())
    (pool / "pool.json").write_text(json.dumps({**description, "format": 99}))
    with pytest.raises(PoolError, match="has format 99, written by a newer mooncake-connector"):
        Glances(pool).look()


def test_files_that_are_gone_are_an_error(pool, store):
    (file,) = pool.glob("*/table")
    file.unlink()
    with pytest.raises(PoolError, match=r"gives no figures: .*table"):
        Glances(pool).look()
