"""The tier `mooncake` does what every tier must, on a real cluster of a master and two nodes."""

import pytest
from tiers.mooncake_cluster import Cluster, needs_mooncake

from store_client.tiers.testing import TierConformance


@pytest.fixture(scope="module")
def cluster():
    needs_mooncake()
    with Cluster(flags=("--default_kv_lease_ttl=60000", "--client_ttl=120")) as running:  # a busy machine reads long
        yield running


@pytest.fixture(scope="module")
def connected(cluster):
    tier = cluster.tier()
    yield tier
    tier.close()


class TestMooncake(TierConformance):
    @pytest.fixture
    def make_tier(self, cluster, connected, request, monkeypatch):
        """One tier for all tests, since to connect takes seconds; memory that a test registered is let go after it."""
        if "closed" in request.node.name:
            yield cluster.tier
            return
        registered, memories = connected._registered, []
        with monkeypatch.context() as patch:
            patch.setattr(connected, "close", lambda: None)
            patch.setattr(connected, "register", lambda memory: (memories.append(memory), registered.add(memory)))
            yield lambda: connected
        for memory in memories:
            registered.remove(memory)
