"""A plain model of pages in shards: what every element is, what each writer has of it, what a reader makes of it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import BlockLayout, PageFormat, SegmentLayout, fit, unpack
from store_client import EmbeddedStore, Put
from store_client.sharded import ShardView
from store_client.testing import DEADLINE_S, chain, namespace, put_pages

PAGE_TOKENS, K_DIM, V_DIM = 2, 3, 1
UNIT_NBYTES = PAGE_TOKENS * (K_DIM + V_DIM)
UNTOUCHED = 0xEE


@dataclass(frozen=True)
class Model:
    """A model of some layers and KV heads, and its pages' keys."""

    num_layers: int
    num_heads: int
    name: str = "m"
    keys: tuple[bytes, ...] = tuple(chain("page", 4))

    @property
    def namespace(self) -> Any:
        return namespace(self.name, num_layers=self.num_layers, num_kv_heads=self.num_heads)

    def elements(self, page: int) -> npt.NDArray[np.uint8]:
        """`[layer, token, head, K then V]`: numbers that differ from place to place."""
        shape = (self.num_layers, PAGE_TOKENS, self.num_heads, K_DIM + V_DIM)
        return np.random.default_rng([page, *self.name.encode()]).integers(0, UNTOUCHED, shape, dtype=np.uint8)

    def stored(self, page: int, shard: Shard) -> npt.NDArray[np.uint8]:
        """The canonical page of one shard."""
        part = self.elements(page)[shard.layer_start : shard.layer_stop, :, shard.head_start : shard.head_stop]
        return np.concatenate([part[..., :K_DIM].ravel(), part[..., K_DIM:].ravel()])


def units(shard: Shard) -> set[tuple[int, int]]:
    """The (layer, head) pairs of a shard."""
    return {
        (layer, head)
        for layer in range(shard.layer_start, shard.layer_stop)
        for head in range(shard.head_start, shard.head_stop)
    }


def ranks(layer_cuts: Sequence[int], tp_size: int, model: Model) -> list[Shard]:
    """The shards of an instance with a PP stage between every two cuts; more TP ranks than heads replicate them."""
    borders = [0, *sorted(set(layer_cuts)), model.num_layers]
    count = max(model.num_heads // tp_size, 1)
    firsts = dict.fromkeys(rank * model.num_heads // tp_size for rank in range(tp_size))
    return [Shard(start, stop, first, first + count) for start, stop in itertools.pairwise(borders) for first in firsts]


@st.composite
def instances(draw: st.DrawFn, model: Model) -> list[Shard]:
    cuts = draw(st.lists(st.integers(1, model.num_layers - 1), max_size=2)) if model.num_layers > 1 else []
    heads = model.num_heads
    sizes = [size for size in range(1, 2 * heads + 1) if heads % size == 0 or size % heads == 0]
    return ranks(cuts, draw(st.sampled_from(sizes)), model)


models = st.builds(Model, st.integers(1, 5), st.sampled_from([1, 2, 4, 6, 8]))


@dataclass
class Reader:
    """A rank's memory, filled through `fit` as an adapter does it, and what it was shown."""

    model: Model
    shard: Shard
    memory: npt.NDArray[np.uint8] = field(init=False)
    shown: dict[int, list[Shard]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        shape = (self.shard.num_layers, len(self.model.keys), self.shard.num_heads, PAGE_TOKENS, K_DIM + V_DIM)
        self.memory = np.full(shape, UNTOUCHED, dtype=np.uint8)

    def consume(self, i: int, part: Shard, page: npt.NDArray[np.uint8]) -> None:
        self.shown[i].append(part)
        own = PageFormat(self.shard.num_layers, PAGE_TOKENS, self.shard.num_heads, K_DIM, V_DIM, itemsize=1)
        fmt, common = fit(own, self.shard, part)
        layer, block, head, token, _ = self.memory.strides
        layout = BlockLayout(
            layer_addresses=tuple(self.memory.ctypes.data + layer * n for n in range(len(self.memory))),
            num_blocks=len(self.model.keys),
            block_tokens=PAGE_TOKENS,
            block_stride=block,
            head_stride=head,
            k=SegmentLayout(0, ((PAGE_TOKENS, token),), ((K_DIM, 1),)),
            v=SegmentLayout(K_DIM, ((PAGE_TOKENS, token),), ((V_DIM, 1),)),
        )
        unpack(fmt, layout, [i], 0, page, part=common)

    def page(self, i: int) -> npt.NDArray[np.uint8]:
        """Page i as `Model.elements` has it."""
        return self.memory[:, i].transpose(0, 2, 1, 3)

    def expected(self, i: int) -> npt.NDArray[np.uint8]:
        shard = self.shard
        return self.model.elements(i)[shard.layer_start : shard.layer_stop, :, shard.head_start : shard.head_stop]


class Pool:
    """A pool, and for each page the shards that have it."""

    def __init__(self, store: EmbeddedStore, model: Model) -> None:
        self.store, self.model = store, model
        self.holders: dict[int, set[Shard]] = defaultdict(set)

    def put(self, shard: Shard, pages: Iterable[int]) -> None:
        space, numbers = self.store.space(self.model.namespace, shard), sorted(pages)
        keys = [self.model.keys[page] for page in numbers]
        contents = [self.model.stored(page, shard) for page in numbers]
        assert Put.FAILED not in put_pages(space, keys, contents, parents=[None] * len(keys), deadline_s=DEADLINE_S)
        for page in numbers:
            self.holders[page].add(shard)

    def lose(self, page: int, shard: Shard) -> None:
        self.store.space(self.model.namespace, shard).remove([self.model.keys[page]])
        self.holders[page].discard(shard)

    def view(self, shard: Shard) -> ShardView:
        return ShardView(self.store, self.model.namespace, shard, UNIT_NBYTES)

    def has(self, page: int, shard: Shard) -> bool:
        """Whether all layers and heads of `shard` are somewhere."""
        return units(shard) <= set().union(*map(units, self.holders[page]))
