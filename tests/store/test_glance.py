"""A look at a pool's figures from outside."""

import json

import pytest
from store.pools import running, space_in

from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore
from store_client.embedded import glance, pool_users
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


def test_no_counter_falls_while_counts_are_handed_over(pool, store, space, monkeypatch):
    """They leave the process's page a moment before they are in the header."""
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
