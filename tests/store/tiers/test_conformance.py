"""Each tier that needs no server does what every tier must, and so does the plainest one."""

import pytest
from store.tiers.memory import MemoryTier

from store_client.tiers.testing import MakeTier, TierConformance


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return MemoryTier
