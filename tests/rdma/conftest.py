"""Tests of the `rdma` transport: those marked `inside` need a card, which the emulated machine has (`machine.py`)."""

from __future__ import annotations

import os

import pytest
from rdma.machine import VARIABLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if VARIABLE not in os.environ:
        for item in items:
            if item.get_closest_marker("inside"):
                item.add_marker(pytest.mark.skip(reason="runs inside of the emulated machine"))
