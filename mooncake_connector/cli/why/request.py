"""What engines have left in the pool of one request that they answered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from mooncake_connector.cli.columns import clean
from mooncake_connector.cli.output import human_seconds
from mooncake_connector.cli.why import runs
from mooncake_connector.config.sources import environ_name
from mooncake_connector.errors import PoolError
from mooncake_connector.misses import Miss
from mooncake_connector.request_record import RequestRecord, RunRecord
from store_client import EmbeddedStore
from store_client.fate import Fate, Known, Lost
from store_client.runs import Run


def find(store: EmbeddedStore, wanted: str) -> list[RequestRecord]:
    """The requests of this id, or else those whose id has it in it, as engines add to what clients send; the oldest
    first. Raises PoolError where there is none."""
    kept = [record for told in store.noted_requests() if (record := RequestRecord.decode(told)) is not None]
    kept.sort(key=lambda record: record.at_s)
    found = [record for record in kept if record.id == wanted] or [record for record in kept if wanted in record.id]
    if found:
        return found
    if not kept:
        raise PoolError(
            f"no request is kept in this pool: an engine keeps its last few hundred where log_requests is set "
            f"({environ_name('log_requests')}=1)"
        )
    latest = kept[-1].id
    raise PoolError(f"request {wanted!r} is not among the {len(kept)} that are kept here; the latest is {latest!r}")


def lines(record: RequestRecord) -> list[str]:
    ago = human_seconds(record.age_s)
    where = f", namespace {record.namespace[:8]}" if record.namespace else ""
    sources = {
        "in the engine's own cache": record.local_tokens,
        "from the pool": record.hit_tokens,
        "from a prefill instance": record.fetched_tokens,
        "computed": record.computed_tokens,
    }
    told = [
        f"request {clean(record.id)}, {ago} ago, pid {record.pid}{where}",
        f"{record.prompt_tokens:,} tokens: " + ", ".join(f"{tokens:,} {where}" for where, tokens in sources.items()),
    ]
    if record.runs:
        told.append(runs.line(_runs(record.runs, record.age_s)))
    if record.has_salt:
        told.append("salt: it shares pages with requests of the same cache_salt, or extra_key, alone")
    told += [f"{tokens:,} tokens {_said(why)}" for why, tokens in record.missed.items()]
    if (words := _words(record.miss)) is not None:
        told.append(f"what to do: {words.do}")
    return told


def plain(records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(record) for record in records]


def _words(why: str | None) -> Any:
    return Miss(why).words if why in {miss.value for miss in Miss} else None


def _said(why: str) -> str:
    words = _words(why)
    return clean(why) if words is None else words.said


def _runs(told: Iterable[RunRecord], age_s: float) -> list[Run]:
    """As `store_client.runs.runs_of` gives them, seen from now."""
    found: list[Run] = []
    reached = True
    for run in told:
        known = Known(run.known) if run.known in {each.value for each in Known} else Known.UNKNOWN
        cause = next((lost for lost in Lost if lost.value == run.cause), None)
        reached = reached and known is Known.STORED
        found.append(Run(run.first, run.last, Fate(known, cause, run.ago_s + age_s, run.unused_s), reached))
    return found
