"""Each tier that needs no server does what every tier must, and so does the plainest one."""

from pathlib import Path

import pytest
from store.tiers.memory import MemoryTier

from mooncake_connector.config.tiers import DiskTier, FolderTier
from store_client.tiers.disk import Disk
from store_client.tiers.folder import SharedFolder
from store_client.tiers.testing import MakeTier, TierConformance


class TestMemoryTier(TierConformance):
    @pytest.fixture
    def make_tier(self) -> MakeTier:
        return MemoryTier


class TestDisk(TierConformance):
    @pytest.fixture(params=[True, False], ids=["direct", "cached"])
    def make_tier(self, tmp_path: Path, request: pytest.FixtureRequest) -> MakeTier:
        return lambda: Disk(DiskTier(path=tmp_path / "disk", capacity=64 << 20, direct=request.param))


class TestSharedFolder(TierConformance):
    @pytest.fixture
    def make_tier(self, tmp_path: Path) -> MakeTier:
        return lambda: SharedFolder(FolderTier(path=tmp_path))
