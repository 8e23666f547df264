"""What `make bench NAME=hicache` does and moves, and the rows and goals made of its seconds. It measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from bench.peers.mooncake_store import BETWEEN
from bench.peers.report import Goal, Row, row
from mooncake_connector.cli.bench.measure import gigabytes_per_second

GET, SET, EXISTS = "batch_get", "batch_set", "batch_exists"
MEMCPY = "memcpy"

CANONICAL = "page_first_direct"
ZERO_COPY = (CANONICAL, "layer_first")
"""Host layouts whose runs of bytes are the canonical page's own, so that a page is moved without a permutation."""
PERMUTED = ("page_first", "page_head")


@dataclass(frozen=True)
class Geometry:
    """A model's KV cache in bf16."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int


LOOKUP = Geometry("lookup", 1, 1, 64)
"""Small pages: what a lookup costs does not depend on their size."""


@dataclass(frozen=True)
class HicacheScale:
    """How much a run does; the defaults are what docs/benchmarks.md shows."""

    geometries: tuple[Geometry, ...] = (
        Geometry("SmolLM2", num_layers=30, num_heads=3, head_dim=64),
        Geometry("8B GQA", num_layers=32, num_heads=8, head_dim=128),
    )
    layouts: tuple[str, ...] = ZERO_COPY + PERMUTED
    num_pages: int = 128
    page_tokens: int = 64
    lookup_keys: int = 512
    rounds: int = 7

    def page_nbytes(self, geometry: Geometry) -> int:
        """Bytes of one page, K and V."""
        return self.page_tokens * geometry.num_layers * geometry.num_heads * geometry.head_dim * 2 * 2

    @property
    def data_nbytes(self) -> int:
        """Bytes of the pages of all geometries, which lie in a pool at the same time."""
        pages = self.num_pages * sum(map(self.page_nbytes, self.geometries))
        return pages + self.lookup_keys * self.page_nbytes(LOOKUP)


OURS, FILE, MOONCAKE = "mooncake-connector", "file", "mooncake"

Figures = Mapping[tuple[str, str, str, str], float]
"""Seconds by operation, geometry, layout, and name of the backend or memcpy."""

_ZERO_COPY = {
    GET: Goal(at_least_of_limit=0.45, at_least_of_peer=4),
    SET: Goal(at_least_of_limit=0.4, at_least_of_peer=4),
}
_PERMUTED = Goal(at_least_of_limit=0.2)
_FILE = Goal(at_least_of_peer=2)
_EXISTS = Goal(at_most=0.5)


def figures_of(outcome: Mapping[str, Any]) -> Figures:
    """What a child of `hicache` measured; fewer where it failed."""
    return {
        (operation, geometry, layout, name): s for operation, geometry, layout, name, s in outcome.get("figures", ())
    }


def rows(ours: Figures, mooncake: Mapping[str, Figures], scale: HicacheScale) -> list[Row]:
    """All rows. Both peers hold pages in the canonical layout, their fastest; all our layouts are compared to that."""
    return [
        *_data_rows(ours, mooncake, scale),
        *(_file_rows(ours, scale) if any(name == FILE for *_, name in ours) else ()),
        _lookup_row(ours, mooncake, scale),
        *_peer_rows(ours, mooncake, scale),
    ]


def _data_rows(ours: Figures, mooncake: Mapping[str, Figures], scale: HicacheScale) -> Iterator[Row]:
    """Ours beside memcpy of the same rounds and the better of Mooncake's settings between two processes."""
    between = [mooncake.get(setting, {}) for setting in BETWEEN]
    for operation, geometry in product((GET, SET), scale.geometries):
        speeds = [_speed(figures, operation, geometry, CANONICAL, MOONCAKE, scale) for figures in between]
        peer = max(filter(None, speeds), default=None)
        for layout in scale.layouts:
            yield row(
                _title(operation, geometry, layout, scale),
                _speed(ours, operation, geometry, layout, OURS, scale),
                "GB/s",
                limit=_speed(ours, operation, geometry, layout, MEMCPY, scale),
                peer=peer,
                goal=_ZERO_COPY[operation] if layout in ZERO_COPY else _PERMUTED,
            )


def _file_rows(ours: Figures, scale: HicacheScale) -> Iterator[Row]:
    for operation, geometry, layout in product((GET, SET), scale.geometries, ZERO_COPY):
        yield row(
            f"{_title(operation, geometry, layout, scale)}; peer: the file backend",
            _speed(ours, operation, geometry, layout, OURS, scale),
            "GB/s",
            peer=_speed(ours, operation, geometry, CANONICAL, FILE, scale),
            goal=_FILE,
        )


def _lookup_row(ours: Figures, mooncake: Mapping[str, Figures], scale: HicacheScale) -> Row:
    between = [mooncake.get(setting, {}) for setting in BETWEEN]
    return row(
        f"{EXISTS} of {scale.lookup_keys} keys",
        _lookup_ms(ours, OURS),
        "ms",
        peer=min(filter(None, (_lookup_ms(figures, MOONCAKE) for figures in between)), default=None),
        goal=_EXISTS,
    )


def _peer_rows(ours: Figures, mooncake: Mapping[str, Figures], scale: HicacheScale) -> Iterator[Row]:
    """Everything that was measured of the peers; there are no goals for them."""
    peers = [("the file backend", FILE, ours)]
    peers += [(f"the Mooncake backend, {setting}", MOONCAKE, figures) for setting, figures in mooncake.items()]
    for title, name, figures in peers:
        if not any(found == name for *_, found in figures):
            continue
        for operation, geometry in product((GET, SET), scale.geometries):
            yield row(
                f"{title}: {_title(operation, geometry, CANONICAL, scale)}",
                _speed(figures, operation, geometry, CANONICAL, name, scale),
                "GB/s",
                limit=_speed(figures, operation, geometry, CANONICAL, MEMCPY, scale),
            )
        yield row(f"{title}: {EXISTS} of {scale.lookup_keys} keys", _lookup_ms(figures, name), "ms")


def _title(operation: str, geometry: Geometry, layout: str, scale: HicacheScale) -> str:
    return f"{operation}, {geometry.name}, {scale.page_nbytes(geometry) / 2**20:.1f} MiB pages, {layout}"


def _speed(
    figures: Figures, operation: str, geometry: Geometry, layout: str, name: str, scale: HicacheScale
) -> float | None:
    seconds = figures.get((operation, geometry.name, layout, name))
    return gigabytes_per_second(scale.num_pages * scale.page_nbytes(geometry), seconds) if seconds else None


def _lookup_ms(figures: Figures, name: str) -> float | None:
    seconds = figures.get((EXISTS, LOOKUP.name, CANONICAL, name))
    return seconds * 1e3 if seconds else None
