"""The embedded store does what every store must, and so does the plainest one."""

from pathlib import Path

import pytest
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
