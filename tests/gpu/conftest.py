"""What only a GPU can show, in one command: `make test-gpu`. All of it is skipped where there is none."""

import os
from pathlib import Path

import pytest
from gpu.device import STAND_IN


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Over the stand-in one case of each test; tests/transfer has the conformance classes over it."""
    if STAND_IN:
        cases = {item.nodeid.partition("[")[0]: item for item in reversed(items) if getattr(item, "cls", None) is None}
        items[:] = [item for item in items if item in cases.values()]


@pytest.fixture
def kernels():
    """The module of kernels, compiled for this machine's GPU."""
    for name in ("torch", "triton"):
        pytest.importorskip(name, reason=f"the kernel needs {name}: run this in an engine's environment")
    from transfer.transports.cuda import kernels as device_kernels

    return device_kernels


@pytest.fixture(autouse=True)
def others_find_the_tests(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
