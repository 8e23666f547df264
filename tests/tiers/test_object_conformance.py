"""The tier `object` does what every tier must, on two S3 servers."""

import pytest
from tiers.s3_servers import environment, opened

from store_client.tiers.testing import TierConformance


class TestGateway(TierConformance):
    @pytest.fixture
    def make_tier(self, gateway, monkeypatch):
        environment(monkeypatch)
        return lambda: opened(gateway.port)


class TestConditionalPuts(TierConformance):
    @pytest.fixture
    def make_tier(self, files, monkeypatch):
        environment(monkeypatch)
        return lambda: opened(files.port, capacity=1 << 40)
