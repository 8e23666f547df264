"""A rectangle of layers and KV heads: what a rank holds of a model, a page has of it, or two of them have in common.

Pure values. What the bytes of a rectangle are is `mooncake_connector.kv.page`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Shard:
    """Half-open ranges of layers and of KV heads (MLA: heads 0..1), neither empty.

    Layers and heads are counted over the model, so that shards of different ranks can be compared; `seen_from` counts
    those of one rank's memory or page.
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    def __post_init__(self) -> None:
        if not (0 <= self.layer_start < self.layer_stop and 0 <= self.head_start < self.head_stop):
            raise ValueError(f"{self} is empty or negative: expected 0 <= start < stop for layers and for heads")

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_stop)

    @property
    def heads(self) -> range:
        return range(self.head_start, self.head_stop)

    @property
    def num_layers(self) -> int:
        return self.layer_stop - self.layer_start

    @property
    def num_heads(self) -> int:
        return self.head_stop - self.head_start

    @property
    def num_units(self) -> int:
        """Layers times heads."""
        return self.num_layers * self.num_heads

    def covers(self, other: Shard) -> bool:
        layers = self.layer_start <= other.layer_start and other.layer_stop <= self.layer_stop
        return layers and self.head_start <= other.head_start and other.head_stop <= self.head_stop

    def common(self, other: Shard) -> Shard | None:
        """What both have, if anything."""
        layers = max(self.layer_start, other.layer_start), min(self.layer_stop, other.layer_stop)
        heads = max(self.head_start, other.head_start), min(self.head_stop, other.head_stop)
        return Shard(*layers, *heads) if layers[0] < layers[1] and heads[0] < heads[1] else None

    def seen_from(self, outer: Shard) -> Shard:
        """The same layers and heads, counted from the first ones of a shard that covers them."""
        layer, head = outer.layer_start, outer.head_start
        return Shard(self.layer_start - layer, self.layer_stop - layer, self.head_start - head, self.head_stop - head)

    def cut(self, others: Iterable[Shard]) -> list[Shard]:
        """The cells that all borders of the others cut this into: each of the others has a cell as a whole or not."""
        every = list(others)
        layers = _cut(self.layers, [other.layers for other in every])
        heads = _cut(self.heads, [other.heads for other in every])
        return [Shard(*between, *among) for between in layers for among in heads]


def _cut(whole: range, others: list[range]) -> list[tuple[int, int]]:
    inside = {cut for other in others for cut in (other.start, other.stop) if whole.start < cut < whole.stop}
    return list(pairwise(sorted({whole.start, whole.stop} | inside)))
