"""What is left in the pool of each request, for `mooncake-connector why --request`, where `log_requests` is set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.misses import Miss
from mooncake_connector.request_line import RequestLine
from mooncake_connector.request_record import RequestRecord, RunRecord
from store_client.fate import Fate, Known
from store_client.open import BackgroundStore
from store_client.runs import runs_of
from store_client.sharded import ShardView

if TYPE_CHECKING:
    from vllm_plugin.prefix.tracked import Tracked


@dataclass(frozen=True, slots=True)
class Seen:
    """What the pool knew of a prompt when the request had its turn."""

    at_s: float
    namespace: str
    runs: list[RunRecord]


class Keeper:
    """Leaves records in the pool behind `store`."""

    def __init__(self, store: BackgroundStore, page_tokens: int) -> None:
        self._store, self._page_tokens = store, page_tokens

    @contained(nothing)
    def look(self, tracked: Tracked, namespace: Namespace | None, views: Sequence[ShardView]) -> None:
        """Before anything of it is loaded, computed or stored."""
        first = tracked.local_tokens // self._page_tokens
        stop = tracked.request.num_prompt_tokens // self._page_tokens
        runs: list[RunRecord] = []
        if views and tracked.root is not None and first < stop:
            keys = tracked.page_keys(stop, self._page_tokens)[first:stop]
            fates = [_of_all(each) for each in zip(*(view.explain(keys) for view in views), strict=True)]
            runs = [_record(first + run.first, first + run.last, run.fate) for run in runs_of(fates)]
        tracked.seen = Seen(time.time(), "" if namespace is None else namespace.digest.hex(), runs)

    @contained(nothing)
    def keep(self, line: RequestLine, tracked: Tracked, missed: Mapping[Miss, int]) -> None:
        """The request is over, as far as its prompt goes."""
        seen, tracked.seen = tracked.seen, None
        store = self._store.store
        if seen is None or store is None:
            return
        record = RequestRecord.of(
            line, at_s=seen.at_s, namespace=seen.namespace, page_tokens=self._page_tokens, missed=missed,
            has_salt=tracked.request.cache_salt is not None, runs=seen.runs,
        )  # fmt: skip
        store.note_request(record.id, record.encode())


def _of_all(fates: Sequence[Fate]) -> Fate:
    """Of a page that each rank has a part of: why one of them lacks it."""
    return next((fate for fate in fates if fate.known is not Known.STORED), fates[0])


def _record(first: int, last: int, fate: Fate) -> RunRecord:
    cause = None if fate.cause is None else fate.cause.value
    return RunRecord(first, last, fate.known.value, cause, fate.ago_s, fate.unused_s)
