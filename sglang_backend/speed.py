"""How fast this process computes prompts, by what SGLang's scheduler itself adds up of its steps of prefill, and how
many steps of any kind it has ended.

The speed leaves out how long an engine was paused with a step under way, and what a step has beside the one before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mooncake_connector.contain import contained, nothing
from mooncake_connector.prefill_speed import PrefillSpeed
from sglang_backend.targets import Target


@dataclass(slots=True)
class Steps:
    """So many of the scheduler in this process have ended, of any kind."""

    ended: int = 0


steps = Steps()
_LEAST_TOKENS = 64
"""Beyond one a request: what makes a step one of prefill."""

prefill_speed = PrefillSpeed(_LEAST_TOKENS)
"""Of the scheduler in this process."""


def _measures(add: Callable[..., None], scheduler: Any, batch: Any, result: Any) -> None:
    """Around the adding up, at the end of each step."""
    steps.ended += 1
    before = _totals(scheduler)
    add(scheduler, batch, result)
    _note(before, _totals(scheduler), batch)


@contained(nothing)
def _totals(scheduler: Any) -> tuple[int, int]:
    """Microseconds and tokens."""
    return scheduler.total_prefill_busy_us, scheduler.total_prefill_uncached_tokens


@contained(nothing)
def _note(before: tuple[int, int], after: tuple[int, int], batch: Any) -> None:
    (began_us, former), (ended_us, tokens) = before, after
    if ended_us > began_us:
        prefill_speed.took((ended_us - began_us) / 1e6, tokens - former, len(batch.reqs))


TARGETS = (
    Target(
        "sglang.srt.managers.scheduler.Scheduler._record_step_counters",
        ("self", "batch", "result"),
        _measures,
        names=("total_prefill_busy_us", "total_prefill_uncached_tokens"),
    ),
)
