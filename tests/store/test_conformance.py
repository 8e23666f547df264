"""The embedded store does what every store must."""

from pathlib import Path

import pytest

from store_client import EmbeddedStore
from store_client.testing import MakeStore, StoreConformance


class TestEmbeddedStore(StoreConformance):
    @pytest.fixture
    def make_store(self, pool: Path) -> MakeStore:
        return lambda: EmbeddedStore(pool, 16 << 20)
