"""Pools for tests, in shared memory where there is some."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from causes import forget_causes
from store.audit import audit
from store.pools import CAPACITY, space_in

from store_client import EmbeddedStore, Space


@pytest.fixture
def pool() -> Iterator[Path]:
    """A pool folder that does not exist yet."""
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mooncake-test-", dir=parent))
    forget_causes()
    yield folder / "pool"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(pool: Path) -> Iterator[EmbeddedStore]:
    """An empty pool, whose space adds up in the end."""
    with EmbeddedStore(pool, CAPACITY) as store:
        yield store
        audit(store)


@pytest.fixture
def space(store: EmbeddedStore) -> Space:
    return space_in(store)
