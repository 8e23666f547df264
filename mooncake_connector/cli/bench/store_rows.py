"""The rows of `bench store` and their goals: from measured seconds to figures. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mooncake_connector.cli.bench import embedded, mooncake_peer
from mooncake_connector.cli.bench.measure import Scale, gigabytes_per_second
from mooncake_connector.cli.bench.report import Goal, Row, row

PeerSeconds = Mapping[str, Mapping[str, Any]]
"""Seconds by figure for each of `mooncake_peer`'s settings; empty where no peer was measured."""

_GET = Goal(at_least_of_limit=0.45, at_least_of_peer=4)
_GET_ONCE = Goal(at_least_of_limit=0.7)
_GET_SCATTERED = Goal(at_least_of_limit=0.35)
_PUT = Goal(at_least_of_limit=0.4, at_least_of_peer=4)
_LOOKUP = Goal(at_most=5, at_most_of_peer=1 / 20)
_PREFIX = Goal(at_most=1.2, at_most_of_peer=1 / 2)
_GROWTH = Goal(at_most=2)
_INDEX = Goal(at_most=300)


def data_rows(seconds: Mapping[str, float], peer: PeerSeconds, scale: Scale) -> list[Row]:
    """Moving pages. The peer's figure is the better of connection pool on and off, between two processes."""
    page, piece = size_text(scale.page_nbytes), size_text(scale.piece_nbytes)
    other = "from another process's pool"
    named = (
        (f"get, {page} pages, {other}, every read verified", embedded.GET, embedded.GET, _GET),
        (f"get, {page} pages, {other}, verified once per process", embedded.GET_ONCE, embedded.GET, _GET_ONCE),
        (f"put, {page} pages, with checksum", embedded.PUT, embedded.PUT, _PUT),
        (
            f"get into {piece} scattered pieces, {other}, every read verified",
            embedded.GET_SCATTERED,
            embedded.GET_SCATTERED,
            _GET_SCATTERED,
        ),
    )
    limit = gigabytes_per_second(scale.data_nbytes, seconds[embedded.MEMCPY])
    return [
        row(
            figure,
            gigabytes_per_second(scale.data_nbytes, seconds[ours]),
            "GB/s",
            limit=limit,
            peer=_peer_speed(peer, theirs, scale),
            goal=goal,
        )
        for figure, ours, theirs, goal in named
    ]


def lookup_rows(seconds: Mapping[str, float], peer: PeerSeconds, scale: Scale) -> list[Row]:
    """Looking keys up; the limit is a bare LMDB."""
    one, prefix = _peer_best(peer, embedded.LOOKUP), _peer_best(peer, embedded.PREFIX)
    return [
        row(
            "one lookup",
            seconds[embedded.LOOKUP] * 1e6,
            "us",
            limit=seconds[embedded.LMDB_LOOKUP] * 1e6,
            peer=one * 1e6 if one else None,
            goal=_LOOKUP,
        ),
        row(
            f"prefix lookup of {scale.prefix_keys:,} keys",
            seconds[embedded.PREFIX] * 1e3,
            "ms",
            limit=seconds[embedded.LMDB_PREFIX] * 1e3,
            peer=prefix * 1e3 if prefix else None,
            goal=_PREFIX,
        ),
    ]


def index_rows(growth: Mapping[str, float], nbytes_per_page: float, scale: Scale) -> list[Row]:
    """What the size of the index costs."""
    sizes = f"{scale.large_index:,} keys in the index over {scale.small_index:,}"
    return [
        row(f"one lookup, {sizes}", growth[embedded.LOOKUP], "times", goal=_GROWTH),
        row(f"prefix lookup, {sizes}", growth[embedded.PREFIX], "times", goal=_GROWTH),
        row(f"index memory at {scale.large_index:,} pages", nbytes_per_page, "bytes a page", goal=_INDEX),
    ]


def peer_rows(peer: PeerSeconds, scale: Scale, memcpy_seconds: float) -> list[Row]:
    """Everything that was measured of the peer, setting by setting; there are no goals for it."""
    limit = gigabytes_per_second(scale.data_nbytes, memcpy_seconds)
    rows = []
    for setting, seconds in peer.items():
        for figure in (embedded.GET, embedded.PUT, embedded.GET_SCATTERED):
            speed = gigabytes_per_second(scale.data_nbytes, seconds[figure]) if figure in seconds else None
            rows.append(row(f"Mooncake Store, {figure}, {setting}", speed, "GB/s", limit=limit))
        for figure, unit, factor in ((embedded.LOOKUP, "us", 1e6), (embedded.PREFIX, "ms", 1e3)):
            value = seconds[figure] * factor if figure in seconds else None
            rows.append(row(f"Mooncake Store, {figure}, {setting}", value, unit))
    return rows


def _peer_best(peer: PeerSeconds, figure: str) -> float | None:
    settings = (mooncake_peer.POOL_OFF, mooncake_peer.POOL_ON)
    return min((peer[name][figure] for name in settings if figure in peer.get(name, {})), default=None)


def _peer_speed(peer: PeerSeconds, figure: str, scale: Scale) -> float | None:
    seconds = _peer_best(peer, figure)
    return gigabytes_per_second(scale.data_nbytes, seconds) if seconds else None


def size_text(nbytes: int) -> str:
    """``1 MiB``, ``32 KiB``."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
