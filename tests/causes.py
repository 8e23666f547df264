"""What was logged once is logged again: between tests, as in a new process."""

from __future__ import annotations

from mooncake_connector import log


def forget_causes() -> None:
    log._seen.clear()
