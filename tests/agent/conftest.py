"""Pools for tests of what lies behind them, and a tier in memory."""

from __future__ import annotations

import pytest
from agent.memory_tier import MemoryTier
from store.conftest import pool, store

from store_client import EmbeddedStore
from store_client.embedded import EmbeddedSpace
from store_client.testing import SHARD, namespace

__all__ = ["pool", "store"]


@pytest.fixture
def space(store: EmbeddedStore) -> EmbeddedSpace:
    return store.space(namespace(), SHARD)


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()
