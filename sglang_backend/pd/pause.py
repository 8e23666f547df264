"""A pause of the prefill instance in mode `retract`, while a prompt is computed chunk by chunk.

After each chunk SGLang exchanges its pages for equal ones of the radix tree, frees its own, and then has what it kept
sent. With overlap scheduling the pause takes up the result of the last chunk without that step, and makes the exchange
when generation continues: pages that were given to us are another request's by then. So the exchange is made first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def exchanging_first(is_ours: Callable[[], bool]) -> Callable[..., Any]:
    """A hook around the scheduler's `pause_generation`."""

    def pause(pause: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
        req = scheduler.chunked_req
        if recv_req.mode == "retract" and req is not None and is_ours() and _is_sent_by_the_pause(scheduler, req):
            scheduler.checkpoint_disagg_prefill(req)
        return pause(scheduler, recv_req)

    return pause


def _is_sent_by_the_pause(scheduler: Any, req: Any) -> bool:
    is_prefill = scheduler.disaggregation_mode.value == "prefill"
    is_taken_up = scheduler.enable_overlap and bool(scheduler.last_batch)
    return is_prefill and is_taken_up and not req.pending_bootstrap and not req.finished()
