"""What an engine leaves in its pool of each request that it answered, for `mooncake-connector why --request`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from mooncake_connector.request_record import RequestRecord, RunRecord
from store_client.fate import Fate, Known
from store_client.open import BackgroundStore
from store_client.runs import Run, runs_of
from store_client.sharded import ShardView

_CONTAINER = os.urandom(8).hex()
"""Processes of containers that share a pool may have the same pids."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the pool knew of a prompt when it was looked up; `namespace` as in :class:`RequestRecord`."""

    at_s: float
    namespace: str
    runs: list[RunRecord]


def look(namespace: Namespace | None, views: Sequence[ShardView], keys: Sequence[bytes], first: int) -> Seen:
    """Of the pages `keys` of a prompt, of which the first is its page `first`; of nothing where there are no `views`.

    Before any of them is loaded, computed or stored. Raises what `ShardView.explain` does.
    """
    runs: list[RunRecord] = []
    if views and keys:
        fates = [_of_all(each) for each in zip(*(view.explain(keys) for view in views), strict=True)]
        runs = [_record(first, run) for run in runs_of(fates)]
    return Seen(time.time(), "" if namespace is None else namespace.digest.hex(), runs)


def keep(
    store: BackgroundStore, line: RequestLine, seen: Seen, *, page_tokens: int, missed: Mapping[Miss, int],
    has_salt: bool,
) -> None:  # fmt: skip
    """The request is over, as far as its prompt goes. Nothing is kept while there is no store."""
    if store.store is None:
        return
    record = RequestRecord.of(
        line, at_s=seen.at_s, namespace=seen.namespace, page_tokens=page_tokens, missed=missed, has_salt=has_salt,
        runs=seen.runs,
    )  # fmt: skip
    # The instances of a prefill and a decode side call a request the same, and may have one pool.
    store.store.note_request(f"{_CONTAINER} {record.pid} {record.id}", record.encode())


def _of_all(fates: Sequence[Fate]) -> Fate:
    """Of a page that each rank has a part of: why one of them lacks it."""
    return next((fate for fate in fates if fate.known is not Known.STORED), fates[0])


def _record(first: int, run: Run) -> RunRecord:
    fate = run.fate
    cause = None if fate.cause is None else fate.cause.value
    return RunRecord(first + run.first, first + run.last, fate.known.value, cause, fate.ago_s, fate.unused_s)
