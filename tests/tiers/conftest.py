"""Servers that the tests of the tier `object` share."""

from collections.abc import Iterator

import pytest
from tiers.s3_servers import Files, Gateway


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("juicefs")) as server:
        yield server


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with Files(tmp_path_factory.mktemp("localbucket")) as server:
        yield server
