"""A mover, the store that it loads from, an engine's memory, and the clock of both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from causes import forget_causes
from store.landing import LandingSpace, LandingStore
from store.mover.moves import NBYTES, PATIENCE_S, Clock, Memory

import store_client.jobs
import store_client.mover
from store_client.mover import Mover
from store_client.sharded import ShardView
from store_client.testing import SHARD, namespace


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """And one page a move."""
    clock = Clock()
    for module in (store_client.jobs, store_client.mover):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(store_client.jobs, "_MOVE_NBYTES", 0)
    monkeypatch.setattr(store_client.jobs, "_MOVE_PAGES", 1)
    forget_causes()
    return clock


@pytest.fixture
def space():
    space = LandingSpace(NBYTES)
    yield space
    space.let_read(1000)


@pytest.fixture
def view(space):
    return ShardView(LandingStore(space), namespace(), SHARD, NBYTES // 8)


@pytest.fixture
def mover():
    mover = Mover("load")
    yield mover
    mover.stop(PATIENCE_S)


@pytest.fixture
def memory() -> Memory:
    return Memory()
