"""How fast this process computes prompts: from SGLang's own time at which a step was launched to its result.

The hook is around what SGLang does with each step's result, which it waits for there, also where the next step is
under way already.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from mooncake_connector.contain import contained, nothing
from mooncake_connector.prefill_speed import PrefillSpeed
from sglang_backend.targets import Target

_LEAST_TOKENS = 64
"""Beyond one a request: what makes a step one of prefill."""

prefill_speed = PrefillSpeed(_LEAST_TOKENS)
"""Of the scheduler in this process."""


@contained(nothing)
def _measures(result: None, scheduler: Any, batch: Any, *args: Any, **more: Any) -> None:
    """After a step."""
    extends = batch.forward_mode.is_extend_without_speculative()
    prefill_speed.over(batch.launch_ts, sum(batch.extend_lens) if extends else 0, len(batch.reqs))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

TARGETS = (
    Target(f"{_SCHEDULER}.run_batch", ("self", "batch", "pp_proxy_tensors"), names=("launch_ts", "monotonic")),
    Target(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.copy",
        ("self",),
        names=("forward_mode", "extend_lens", "launch_ts"),
    ),
    Target(f"{_SCHEDULER}.process_batch_result", ("self", "batch", "result"), _measures, HookType.AFTER),
)
