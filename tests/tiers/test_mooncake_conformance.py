"""The tier `mooncake` does what every tier must, on a real cluster of a master and two nodes."""

import pytest
from tiers.mooncake_cluster import Cluster

from store_client.tiers.testing import TierConformance


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("mooncake.store")
    with Cluster() as running:
        yield running


class TestMooncake(TierConformance):
    @pytest.fixture
    def make_tier(self, cluster):
        return cluster.tier
