"""What a store holds, as tables for people and as plain values for JSON."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mooncake_connector.cli.columns import clean, folded, pairs, sheet
from mooncake_connector.cli.output import human_seconds, human_share
from mooncake_connector.sizes import human_nbytes
from store_client import SpaceInfo, StoreStats
from store_client.embedded import PoolUser

ID_DIGITS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class NamespaceTotal:
    """One namespace, its shards added up."""

    id: str
    model_name: str
    kv_dtype: str
    page_tokens: int
    shards: int
    pages: int
    nbytes: int
    oldest_s: float
    idle_s: float


def totals(spaces: Iterable[SpaceInfo]) -> list[NamespaceTotal]:
    """The namespaces behind `spaces`, the largest first."""
    groups: dict[bytes, list[SpaceInfo]] = {}
    for space in spaces:
        groups.setdefault(space.namespace.digest, []).append(space)
    found = [
        NamespaceTotal(
            id=digest.hex(),
            model_name=group[0].namespace.model_name,
            kv_dtype=group[0].namespace.kv_dtype,
            page_tokens=group[0].namespace.page_tokens,
            shards=len(group),
            pages=sum(space.pages for space in group),
            nbytes=sum(space.nbytes for space in group),
            oldest_s=max(space.oldest_s for space in group),
            idle_s=min((space.idle_s for space in group if space.pages), default=0.0),
        )
        for digest, group in groups.items()
    ]
    return sorted(found, key=lambda total: (-total.nbytes, total.id))


def plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict of plain values."""
    return {
        field.name: dict(inner) if hasattr(inner := getattr(value, field.name), "items") else inner
        for field in dataclasses.fields(value)
    }


def namespaces_json(spaces: Iterable[SpaceInfo]) -> list[dict[str, Any]]:
    return [plain(total) for total in totals(spaces)]


def spaces_json(spaces: Iterable[SpaceInfo]) -> list[dict[str, Any]]:
    return [
        {
            "id": space.namespace.digest.hex(),
            "namespace": space.namespace.to_dict(),
            "shard": dataclasses.asdict(space.shard),
            "pages": space.pages,
            "nbytes": space.nbytes,
            "oldest_s": space.oldest_s,
            "idle_s": space.idle_s,
        }
        for space in _sorted(spaces)
    ]


def stats_lines(stats: StoreStats, width: int | None) -> list[str]:
    share = human_share(stats.used_nbytes, stats.capacity_nbytes)
    used, capacity = human_nbytes(stats.used_nbytes), human_nbytes(stats.capacity_nbytes)
    tokens = stats.hit_tokens + stats.missed_tokens
    failures = ", ".join(f"{cause} {count:,}" for cause, count in sorted(stats.failures.items()) if count)
    rows = [
        ("used", f"{used} of {capacity} ({share})"),
        ("pages", f"{stats.pages:,} of at most {stats.max_pages:,}"),
        ("index", human_nbytes(stats.index_nbytes)),
        ("hit tokens", f"{stats.hit_tokens:,} ({human_share(stats.hit_tokens, tokens)} of those looked up)"),
        ("missed tokens", f"{stats.missed_tokens:,}"),
        ("read", f"{stats.read_pages:,} pages, {human_nbytes(stats.read_nbytes)}"),
        ("stored", f"{stats.stored_pages:,} pages, {human_nbytes(stats.stored_nbytes)}"),
        ("already present", f"{stats.present_pages:,} pages"),
        ("evicted", f"{stats.evicted_pages:,} pages"),
        ("removed", f"{stats.removed_pages:,} pages"),
        ("corrupt", f"{stats.corrupt_pages:,} pages"),
        ("taken back from dead writers", human_nbytes(stats.reclaimed_nbytes)),
        ("failures", failures or "none"),
    ]
    return pairs(f"Pool {clean(stats.location)}", rows, width)


def namespaces_lines(spaces: Sequence[SpaceInfo], width: int | None) -> list[str]:
    headings = ("id", "model~", "KV dtype", "tokens>", "shards>", "pages>", "size>", "oldest>", "idle>")
    rows = [
        (
            total.id[:ID_DIGITS],
            total.model_name,
            total.kv_dtype,
            str(total.page_tokens),
            str(total.shards),
            *_amounts(total.pages, total.nbytes, total.oldest_s, total.idle_s),
        )
        for total in totals(spaces)
    ]
    return sheet("Namespaces", headings, rows, width)


def spaces_lines(spaces: Sequence[SpaceInfo], width: int | None) -> list[str]:
    headings = ("id", "model~", "KV dtype", "layers", "heads", "pages>", "size>", "oldest>", "idle>")
    rows = [_space_row(space) for space in _sorted(spaces)]
    return sheet("", headings, rows, width)


def users_json(users: Sequence[PoolUser] | None) -> list[dict[str, Any]] | None:
    return None if users is None else [dataclasses.asdict(user) for user in users]


def users_lines(users: Sequence[PoolUser] | None, width: int | None) -> list[str]:
    """The processes that have a pool open. None: it could not be found out."""
    if users is None:
        return folded(
            "Used by: unknown; a process that does not run (stopped, or under a debugger) keeps the pool locked, "
            "or the pool is damaged",
            width or sys.maxsize,
        )
    if not users:
        return ["Used by no other process"]
    rows = [(place_of(user), human_seconds(user.since_s), user.command or "-") for user in users]
    return sheet("Used by", ("process", "for>", "command~"), rows, width)


def tiers_lines(report: Mapping[str, Any], width: int | None) -> list[str]:
    """What lies behind a pool, nearest first, as its agent reports it (`agent --status --json`)."""
    rows = [
        (
            tier["title"],
            tier_state(tier),
            f"{tier['write']}, shared" if tier["share"] else tier["write"],
            f"{tier.get('fetched_pages', 0):,} ({human_nbytes(tier.get('fetched_nbytes', 0))})",
            f"{tier.get('written_pages', 0):,} ({human_nbytes(tier.get('written_nbytes', 0))})",
            "-" if tier.get("used_nbytes") is None else human_nbytes(tier["used_nbytes"]),
            ", ".join(f"{cause} {count:,}" for cause, count in tier.get("errors", {}).items()) or "-",
        )
        for tier in report["tiers"]
    ]
    title = f"Tiers, by the agent (pid {report['pid']}, for {human_seconds(report['uptime_s'])})"
    return sheet(title, ("tier", "state", "is given", "fetched>", "written>", "used>", "failed calls~"), rows, width)


def tier_state(tier: Mapping[str, Any]) -> str:
    states = {tier.get("reads"), tier.get("writes")} - {"none", None}
    notes = tier.get("notes", {})
    if states <= {"closed"}:
        return "not open" if "not open" in notes else "works, no room" if "no room" in notes else "works"
    return f"left alone ({tier.get('cause') or 'trying'})" if "open" in states else "tried again"


def user_text(user: PoolUser) -> str:
    """One process as part of a sentence."""
    return f"{place_of(user)} ({user.command})" if user.command else place_of(user)


def place_of(user: PoolUser) -> str:
    if user.pid is None:
        return "unknown"
    return f"pid {user.pid}" if user.here else f"pid {user.pid} in another container (host name {user.host})"


def _space_row(space: SpaceInfo) -> tuple[str, ...]:
    name, shard = space.namespace, space.shard
    return (
        name.digest.hex()[:ID_DIGITS],
        name.model_name,
        name.kv_dtype,
        f"{shard.layer_start}-{shard.layer_stop - 1}/{name.num_layers}",
        "MLA" if name.is_mla else f"{shard.head_start}-{shard.head_stop - 1}/{name.num_kv_heads}",
        *_amounts(space.pages, space.nbytes, space.oldest_s, space.idle_s),
    )


def _sorted(spaces: Iterable[SpaceInfo]) -> list[SpaceInfo]:
    return sorted(
        spaces,
        key=lambda space: (
            space.namespace.model_name,
            space.namespace.digest,
            dataclasses.astuple(space.shard),
        ),
    )


def _amounts(pages: int, nbytes: int, oldest_s: float, idle_s: float) -> tuple[str, str, str, str]:
    if not pages:
        return "0", human_nbytes(nbytes), "-", "-"
    return f"{pages:,}", human_nbytes(nbytes), human_seconds(oldest_s), human_seconds(idle_s)
