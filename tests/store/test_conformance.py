"""The embedded store does what every store must, and so do the plainest one and one that needs time for its answers."""

from pathlib import Path

import pytest
from faults import Faults, FaultyStore, Late
from store.memory import MemoryStore

from store_client import EmbeddedStore
from store_client.testing import MakeStore, StoreConformance


class TestEmbeddedStore(StoreConformance):
    @pytest.fixture
    def make_store(self, pool: Path) -> MakeStore:
        return lambda: EmbeddedStore(pool, 16 << 20)


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore


class TestLateStore(StoreConformance):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        faults = Faults()
        faults.answer = Late(asked=3)
        return lambda: FaultyStore(MemoryStore(), faults)
