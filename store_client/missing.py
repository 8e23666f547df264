"""Why a page is not there, as the engines count it: what the pool remembers of it, in one word."""

from __future__ import annotations

from collections.abc import Iterable

from mooncake_connector.misses import Miss
from store_client.fate import Fate, Known
from store_client.sharded import ShardView


def fate_of(views: Iterable[ShardView], key: bytes) -> Fate | None:
    """What became of a page that not all of these ranks have; None where all have it now.

    A look at memory, for one page of a request and no more.
    """
    fates = (view.explain([key])[0] for view in views)
    return next((fate for fate in fates if fate.known is not Known.STORED), None)


def why_missing(fate: Fate | None) -> Miss:
    """In one word. What has come since the lookup was not there then."""
    return Miss.NEVER_STORED if fate is None or fate.cause is None else Miss.of_cause(fate.cause.value)
