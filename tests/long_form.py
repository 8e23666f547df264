"""Whether the tests take their long forms: thousands of kills instead of dozens, minutes of load instead of seconds."""

from __future__ import annotations

import os

__all__ = ["LONG"]

LONG = os.environ.get("MOONCAKE_TEST_LONG") == "1"
"""Set by `make test-long`."""
