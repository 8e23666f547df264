"""What `mooncake-connector doctor --url` says: why a running server hits the pool as often as it does, and what to do.

It joins the server's own counters, which say why tokens were missed, with the pool on this machine, which says how long
pages stay and whose they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from mooncake_connector.checks import Check, failed, ok, warning
from mooncake_connector.cli import pool as pool_
from mooncake_connector.cli.live import Live, NoFigures, info_of, is_here, look_at
from mooncake_connector.cli.output import human_seconds, human_share
from mooncake_connector.errors import ConfigError, PoolError
from mooncake_connector.kv.namespace import Namespace
from mooncake_connector.misses import Miss
from mooncake_connector.sizes import human_nbytes
from store_client.base import SpaceInfo, StoreStats

_TOLD = 0.01
"""Shares of the queried tokens below this are not told."""
_ODD_SHARE = 0.1
_ODD = {
    Miss.BELOW_MIN_HIT, Miss.EVICTED, Miss.DAMAGED, Miss.REFUSED, Miss.GROUPS_DISAGREE, Miss.RANKS_DISAGREE, Miss.LATE,
    Miss.STALLED, Miss.UNAVAILABLE, Miss.LOAD_FAILED,
}  # fmt: skip
"""What something can be done about."""
_MOST_DIFFERENCES = 3
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def run(url: str, pool: Path | None) -> Iterator[Check]:
    """The checks; a server that says nothing of itself is the last of them.

    Args:
        pool: its folder; None for the configured or usual one.
    """
    try:
        live = look_at(url)
    except NoFigures as error:
        yield failed("server", str(error))
        return
    if not live.engine:
        yield failed("server", f"{live.url} has metrics, but neither vLLM's nor SGLang's: name the engine's own port")
        return
    yield ok("server", f"{_NAMES[live.engine]} at {live.url}")
    connector = _connector(live)
    yield connector
    if not live.has_ours:
        return
    yield from _misses(live)
    yield from _failures(live)
    yield from _pool(live, pool)


def rate(live: Live) -> float | None:
    """Hits of what was queried; None where nothing was."""
    queried = live.ours("queried_tokens")
    return live.ours("hit_tokens") / queried if queried else None


def _connector(live: Live) -> Check:
    if live.has_ours:
        return ok("connector", "it counts on this server's /metrics")
    if live.engine == "sglang":
        backend = info_of(live.url).get("hicache_storage_backend")
        if backend == "mooncake_connector":
            return warning("connector", f"nothing was asked of the pool yet: {_THRESHOLD}")
    return failed(
        "connector",
        f"this server runs without it: `mooncake-connector doctor {live.engine}`, where the server is installed, says "
        "how to start it, and what keeps it out",
    )


_THRESHOLD = (
    "SGLang asks a storage backend only for 256 tokens or more beyond its own cache (prefetch_threshold in "
    "--hicache-storage-backend-extra-config)"
)


def _misses(live: Live) -> Iterator[Check]:
    """The rate, and each reason with a share worth a line, the largest first."""
    queried, hits = live.ours("queried_tokens"), live.ours("hit_tokens")
    if not queried:
        yield warning("hit rate", _unqueried(live))
        return
    misses = live.by_label("miss_tokens", "reason")
    told = (
        f"{human_share(int(hits), int(queried))}: {hits:,.0f} of {queried:,.0f} prompt tokens beyond the engine's own "
    )
    told += f"cache came from the pool{_own(live)}"
    yield ok("hit rate", told) if hits else warning("hit rate", told)
    for word, tokens in sorted(misses.items(), key=lambda entry: -entry[1]):
        share = tokens / queried
        if share >= _TOLD:
            yield _miss(live, word, share, none_hit=not hits)


def _unqueried(live: Live) -> str:
    asked = live.total("vllm:prompt_tokens_total") + live.total("sglang:prompt_tokens_total")
    if not asked:
        return "no request had its turn yet: ask again when there were some"
    if live.engine == "sglang":
        return f"SGLang asked the pool for nothing in {asked:,.0f} prompt tokens: {_THRESHOLD}"
    return f"of {asked:,.0f} prompt tokens none was looked up: see prefix_reuse with `mooncake-connector config show`"


def _own(live: Live) -> str:
    """What vLLM had itself."""
    queries, hits = (live.total(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits"))
    return f"; its own cache had {human_share(int(hits), int(queries))} of all prompts" if queries else ""


def _miss(live: Live, word: str, share: float, *, none_hit: bool) -> Check:
    known = {miss.value: miss for miss in Miss}
    if word not in known:
        return ok("missed", f"{share:.0%} for a reason that this version does not know: {word}")
    miss = known[word]
    told = f"{share:.0%} {miss.words.said}: {miss.words.do}"
    if miss is Miss.EVICTED:
        told = f"{share:.0%} {miss.words.said}{_stay(live)}: {miss.words.do}"
    if miss is Miss.UNAVAILABLE and share > 0.5:
        return failed("missed", told)
    odd = (miss in _ODD and share >= _ODD_SHARE) or (none_hit and miss is Miss.SHORT and share > 0.5)
    return warning("missed", told) if odd else ok("missed", told)


def _stay(live: Live) -> str:
    """For how long evicted pages stayed, and how long they would have had to."""
    requests = live.ours("evicted_requests")
    if not requests:
        return ""
    stayed, needed = live.ours("evicted_unused_seconds") / requests, live.ours("evicted_reuse_seconds") / requests
    told = (
        f"; they went {human_seconds(stayed)} after their last use, and were asked for {human_seconds(needed)} after it"
    )
    if needed > stayed > 0:
        told += f", so the pool would have to be about {max(2, round(needed / stayed))} times as large"
    return told


def _failures(live: Live) -> Iterator[Check]:
    causes = live.by_label("failures", "cause")
    if causes:
        listed = ", ".join(f"{cause} {count:,.0f}" for cause, count in sorted(causes.items(), key=lambda one: -one[1]))
        yield warning("failures", f"{listed}: see docs/troubleshooting.md for each cause")


# The pool


def _pool(live: Live, folder: Path | None) -> Iterator[Check]:
    if folder is None and not is_here(live.url):
        yield warning("pool", f"{live.url} is on another host: run this there, as the server's user, to see its pool")
        return
    try:
        with pool_.opened(folder) as store:
            stats, spaces = store.stats(), store.namespaces()
    except (PoolError, ConfigError) as error:
        yield warning("pool", f"{error}; run this where the server runs, as its user, to see its pool as well")
        return
    yield _fill(stats)
    if (differences := _differences(spaces)) is not None:
        mostly_new = live.by_label("miss_tokens", "reason").get(Miss.NEVER_STORED.value, 0) > live.ours("hit_tokens")
        yield (warning if mostly_new else ok)("namespaces", differences)


def _fill(stats: StoreStats) -> Check:
    used, whole = human_nbytes(stats.used_nbytes), human_nbytes(stats.capacity_nbytes)
    told = f"{stats.location}, {used} of {whole} used by {stats.pages:,} pages"
    if not stats.pages:
        return warning(
            "pool", f"{told}: no page was stored in it; is it the pool of this server (`pool ... open` in its log)?"
        )
    if stats.evicted_pages:
        unused = human_seconds(stats.evicted_unused_s / stats.evicted_pages)
        told += f"; {stats.evicted_pages:,} pages were evicted, {unused} after their last use on average"
    return ok("pool", told)


def _differences(spaces: list[SpaceInfo]) -> str | None:
    """In what namespaces with pages differ that look alike to people; None where no two do."""
    families = {
        space.namespace.family: space.namespace for space in spaces if space.pages and not space.namespace.is_private
    }
    found = [
        f"{one.model_name}: {', '.join(fields)}"
        for one, other in itertools.combinations(families.values(), 2)
        if (fields := _differing(one, other))
    ]
    if not found:
        return None
    listed = "; ".join(found[:_MOST_DIFFERENCES])
    more = f" and {len(found) - _MOST_DIFFERENCES} more" if len(found) > _MOST_DIFFERENCES else ""
    return (
        f"instances of one model share no pages here, since they differ in {listed}{more}: "
        "start them alike, and see `mooncake-connector store ls`"
    )


def _differing(one: Namespace, other: Namespace) -> list[str]:
    """The fields in which two namespaces of one model differ, with both values where they are short."""
    if one.model_digest != other.model_digest and one.model_name != other.model_name:
        return []
    ours, theirs = one.to_dict(), other.to_dict()
    fields = [name for name in ours if name not in ("model_name", "group") and ours[name] != theirs[name]]
    if "model_digest" in fields:
        fields = ["weights or configuration", *(name for name in fields if name != "model_digest")]
    return [
        f"{name} ({ours[name]} and {theirs[name]})"
        if name in ours and len(f"{ours[name]}{theirs[name]}") < 40
        else name
        for name in fields
    ]
