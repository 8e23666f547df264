"""What tests and benchmarks need and no engine does: to wait for the outcome of a write."""

from __future__ import annotations

import queue
import time

from transfer.transports.base import Completion, Outcome

_LATE_S = 60.0
"""The outcome comes by the write's deadline; the machine may be busy."""


def outcome_of(completion: Completion) -> Outcome:
    """Wait for it. Raises queue.Empty where it does not come though its deadline is over."""
    told: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    completion.add_done_callback(told.put)
    return told.get(timeout=max(0.0, completion.deadline_at - time.monotonic()) + _LATE_S)
