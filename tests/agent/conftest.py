"""Pools for tests of what lies behind them, and a tier in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from agent.memory_tier import MemoryTier
from agent.stand_in import configured
from causes import forget_causes
from store.conftest import pool, store

from mooncake_connector.config.schema import Config
from store_client import EmbeddedStore
from store_client.agent import start
from store_client.agent.visit import ask_to_stop
from store_client.embedded import EmbeddedSpace
from store_client.testing import DEADLINE_S, SHARD, namespace

__all__ = ["pool", "store"]


@pytest.fixture
def space(store: EmbeddedStore) -> EmbeddedSpace:
    return store.space(namespace(), SHARD)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not put off starting an agent again."""
    forget_causes()
    monkeypatch.setattr(start, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(start, "_LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def config(pool: Path, tmp_path: Path) -> Iterator[Config]:
    """Of a pool with a disk behind it, whose agent is ended with the test."""
    tiers = [{"kind": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]
    yield configured(pool, agent="auto", tiers=tiers)
    with suppress(Exception):
        ask_to_stop(pool, DEADLINE_S)
