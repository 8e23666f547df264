"""A store that opens in the background: absent until it can be had, and released whenever it comes."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
from simulated.waiting import wait_for

import store_client.open
from mooncake_connector.config.schema import Config
from mooncake_connector.errors import PoolError
from store_client import EmbeddedStore, Store
from store_client.open import BackgroundStore, open_in_background, open_store
from store_client.testing import SHARD, chain, namespace, put_chain

PATIENCE_S = 60.0
CAPACITY_NBYTES = 4 << 20


def small(path: Path) -> Store:
    return EmbeddedStore(path, CAPACITY_NBYTES)


def test_the_configuration_names_folder_and_capacity(pool):
    with open_store(Config(pool=pool, capacity=CAPACITY_NBYTES)) as store:
        stats = store.stats()
        assert (stats.location, stats.capacity_nbytes) == (str(pool), CAPACITY_NBYTES)


def test_without_prefix_reuse_no_store_is_opened_and_what_comes_first_still_runs(pool):
    ran = threading.Event()
    background = open_in_background(Config(pool=pool, prefix_reuse=False), ran.set)
    background.wait(PATIENCE_S)
    assert ran.is_set() and background.store is None and not pool.exists()
    background.close()


def test_a_store_that_opens_late_is_used_from_then_on(pool, monkeypatch):
    monkeypatch.setattr(store_client.open, "_RETRY_S", 0.01)
    ready = threading.Event()

    def opening() -> Store:
        if not ready.is_set():
            raise PoolError("not yet")
        return small(pool)

    background = BackgroundStore(opening)
    background.wait(PATIENCE_S)
    assert background.view(namespace(), SHARD, 8192) is None
    ready.set()
    wait_for(lambda: background.store is not None)
    view = background.view(namespace(), SHARD, 8192)
    assert view is not None and view is background.view(namespace(), SHARD, 8192)
    put_chain(view.own, chain("a", 1))
    background.close()
    assert view.contains(chain("a", 1)) == [False]


def test_views_of_former_namespaces_do_not_pile_up(pool, monkeypatch):
    monkeypatch.setattr(store_client.open, "_MOST_VIEWS", 4)
    background = BackgroundStore(lambda: small(pool))
    background.wait(PATIENCE_S)
    for number in range(10):
        assert background.view(namespace(str(number)), SHARD, 8192) is not None
    assert len(background._views) <= 4
    background.close()


def test_where_what_comes_first_fails_nothing_is_opened(caplog):
    def fail() -> None:
        raise ValueError("no weights here")

    with caplog.at_level(logging.WARNING):
        background = BackgroundStore(lambda: pytest.fail("opened"), fail)
        background.wait(PATIENCE_S)
    assert background.store is None
    assert "prefix reuse from the pool is off: no weights here" in caplog.text
    background.close()


def test_a_store_that_comes_after_the_end_is_closed(pool):
    opening, go = threading.Event(), threading.Event()
    opened: list[Store] = []

    def slowly() -> Store:
        opening.set()
        assert go.wait(PATIENCE_S)
        opened.append(small(pool))
        return opened[0]

    background = BackgroundStore(slowly)
    assert opening.wait(PATIENCE_S)
    closing = threading.Thread(target=background.close)
    closing.start()
    wait_for(background._closed.is_set)
    go.set()
    closing.join(PATIENCE_S)
    background._thread.join(PATIENCE_S)
    with pytest.raises(PoolError):
        opened[0].stats()


def test_what_comes_then_is_given_the_store_once_it_is_open(pool: Path) -> None:
    given: list[Store] = []
    background = BackgroundStore(lambda: small(pool), then=given.append)
    wait_for(lambda: given)
    assert given == [background.store]
    background.close()
