"""Pools for tests, in shared memory where there is some."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from causes import forget_causes


@pytest.fixture
def pool() -> Iterator[Path]:
    """A pool folder that does not exist yet."""
    parent = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mooncake-test-", dir=parent))
    forget_causes()
    yield folder / "pool"
    shutil.rmtree(folder, ignore_errors=True)
