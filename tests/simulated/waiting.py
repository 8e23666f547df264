"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object]) -> None:
    """Poll `condition` until it holds."""
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.005)
