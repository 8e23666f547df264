"""Servers that the tests of the tier `object` share, and tiers that are closed in the end."""

from collections.abc import Iterator

import pytest
from tiers.s3_servers import Files, Gateway

from store_client.tiers.testing import Memory


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("juicefs")) as server:
        yield server


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with Files(tmp_path_factory.mktemp("localbucket")) as server:
        yield server


@pytest.fixture
def tiers():
    """Opens tiers and closes them in the end."""
    opened = []

    def keep(tier):
        opened.append(tier)
        memory = Memory()
        tier.register(memory.all)
        return tier, memory

    yield keep
    for tier in opened:
        tier.close()
