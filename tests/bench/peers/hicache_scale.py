"""What `make bench NAME=hicache` does and moves: operations, geometries, host layouts, counts."""

from __future__ import annotations

from dataclasses import dataclass

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
