"""Looking whether a tier has pages, for somebody who does not want them: a router that asks where a prompt is."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TypeAlias

from store_client.agent.source import Source
from store_client.tiers.base import SpaceName

Holding: TypeAlias = "Future[list[bool] | None]"


def look(source: Source, space: SpaceName, keys: Sequence[bytes], nbytes: int, allowed_s: float) -> Holding:
    """Have a tier asked, by a thread of its own. None where it does not say by then, which is counted as its error."""
    holding: Holding = Future()
    give_up_s = time.monotonic() + allowed_s

    def ask() -> None:
        left_s = give_up_s - time.monotonic()
        found = None
        if left_s > 0:  # else it waited behind others for too long
            found, _, _ = source.call(
                source.looks, source.reads,
                lambda deadline_s: source.tier.contains(space, keys, nbytes=nbytes, deadline_s=deadline_s), left_s,
            )  # fmt: skip
        _settle(holding, found if found is not None and len(found) == len(keys) else None)

    if source.looks.run(ask, lambda cause: _settle(holding, None)):
        _settle(holding, None)
    return holding


def _settle(holding: Holding, found: list[bool] | None) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        holding.set_result(found)
