"""Ranks of a small model with memory of their own, and where every byte of it belongs: a plain model of layouts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np
from hypothesis import strategies as st

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import Axis, BlockLayout, SegmentLayout
from transfer.plan.layout import Section


@dataclass(frozen=True)
class Model:
    layers: int
    heads: int
    k_dim: int
    v_dim: int
    itemsize: int


@dataclass(frozen=True)
class Instance:
    """All ranks of one engine, and the block table of one request (ranks share it, as in an engine)."""

    model: Model
    ranks: list[Section]
    """The one section of each."""
    table: list[int]

    def memory(self, fill: bool) -> list[np.ndarray]:
        """For each rank an array over its addresses: which byte of the request's KV each byte is, or -1."""
        memories = []
        for rank in self.ranks:
            memory = np.full(SPAN, -1, dtype=np.int64)
            if fill:
                names, places = self.bytes_of(rank)
                memory[places] = names
            memories.append(memory)
        return memories

    def bytes_of(self, rank: Section, stop_token: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Every byte of the request's blocks, up to a token: (its name, its address)."""
        model, blocks = self.model, rank.blocks
        stop_token = len(self.table) * blocks.block_tokens if stop_token is None else stop_token
        layers, every, item = (
            np.arange(len(blocks.layer_addresses)),
            np.arange(rank.shard.num_heads),
            np.arange(model.itemsize),
        )
        tokens = np.arange(stop_token)
        block = np.array(self.table)[tokens // blocks.block_tokens] * blocks.block_stride
        bases = np.array(blocks.layer_addresses)[:, None] + block
        names, places = [], []
        for segment, dim, first in ((blocks.k, model.k_dim, 0), (blocks.v, model.v_dim, model.k_dim)):
            if segment is None:
                continue
            in_block = np.array([axis_offset(segment.token, place) for place in range(blocks.block_tokens)])
            elements = np.array([axis_offset(segment.dim, element) for element in range(dim)])
            place = bases + segment.offset + in_block[tokens % blocks.block_tokens]
            place = place[..., None] + elements
            name = (layers[:, None] + rank.shard.layer_start) * TOKENS + tokens
            name = name[..., None] * (model.k_dim + model.v_dim) + first + np.arange(dim)
            name = name[..., None] * model.heads + rank.shard.head_start + every
            places.append((place[..., None] + every * blocks.head_stride)[..., None] + item)
            names.append(name[..., None] * model.itemsize + item)
        return np.concatenate([n.ravel() for n in names]), np.concatenate([p.ravel() for p in places])


SPAN = 1 << 16
"""Addresses a rank has."""
ORDERS = ["".join(order) for order in permutations("LBHN")]
"""Axes of a rank's memory, outermost first: layers, blocks, heads, tokens."""
TOKENS = 1 << 10
"""More than any request here has."""


def axis_offset(axis: Axis, index: int) -> int:
    """Where index `index` of a nested axis lies: its digits in mixed radix, innermost last, times the strides."""
    offset = 0
    for size, stride in reversed(axis):
        index, digit = divmod(index, size)
        offset += digit * stride
    assert index == 0
    return offset


def make_rank(
    model: Model,
    layers: range,
    heads: range,
    block_tokens: int,
    num_blocks: int,
    order: str = "LBHN",
    group: int = 0,
    pad: int = 0,
) -> Section:
    """The KV of a rank whose memory has the axes of `order` from the outside in: a permutation of L, B, H and N.

    `group` > 0: K of all tokens of a block and head, then V, each as `[token // group][element][token % group]`
    (`order` must end in HN then). `pad` bytes follow each block of a layer, or what stands for it.
    """
    item, width = model.itemsize, (model.k_dim + model.v_dim) * model.itemsize
    sizes = {"L": len(layers), "B": num_blocks, "H": len(heads), "N": block_tokens}
    strides: dict[str, int] = {}
    stride = width
    for axis in reversed(order):
        strides[axis] = stride
        stride = stride * sizes[axis] + (pad if axis == "H" else 0)
    assert stride < SPAN - 64
    token: Axis = ((block_tokens, strides["N"]),)
    if group:
        assert order.endswith("HN")
        k, v = (
            SegmentLayout(
                first * block_tokens * item,
                ((block_tokens // group, group * dim * item), (group, item)),
                ((dim, group * item),),
            )
            for first, dim in ((0, model.k_dim), (model.k_dim, model.v_dim))
        )
    else:
        k = SegmentLayout(0, token, ((model.k_dim, item),))
        v = SegmentLayout(model.k_dim * item, token, ((model.v_dim, item),))
    return Section(
        name="kv",
        model_layers=model.layers,
        model_heads=model.heads,
        shard=Shard(layers.start, layers.stop, heads.start, heads.stop),
        k_dim=model.k_dim,
        v_dim=model.v_dim,
        itemsize=item,
        blocks=BlockLayout(
            layer_addresses=tuple(64 + layer * strides["L"] for layer in range(len(layers))),
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            block_stride=strides["B"],
            head_stride=strides["H"],
            k=k,
            v=v if model.v_dim else None,
        ),
    )


def heads_of(model: Model, tp_rank: int, tp_size: int) -> range:
    """As engines split them: evenly, or replicated where there are more ranks than heads."""
    if model.heads >= tp_size:
        count = model.heads // tp_size
        return range(tp_rank * count, tp_rank * count + count)
    first = tp_rank * model.heads // tp_size
    return range(first, first + 1)


def whole_ranks(
    model: Model, tp_size: int, block_tokens: int, num_blocks: int, order: str = "LBHN"
) -> list[Section]:
    """The ranks of an engine without pipeline stages."""
    heads = [heads_of(model, rank, tp_size) for rank in range(tp_size)]
    return [make_rank(model, range(model.layers), mine, block_tokens, num_blocks, order) for mine in heads]


SMALL = make_rank(Model(2, 2, 2, 2, 2), range(2), range(2), 4, 4)
"""For where any rank will do."""


def tp_sizes(heads: int) -> list[int]:
    return [tp for tp in range(1, 9) if heads % tp == 0 or tp % heads == 0]


models = st.builds(
    Model,
    layers=st.integers(1, 4),
    heads=st.sampled_from([1, 2, 3, 4, 6, 8]),
    k_dim=st.integers(1, 3),
    v_dim=st.integers(0, 3),
    itemsize=st.sampled_from([1, 2, 4]),
)


@st.composite
def instances(draw: st.DrawFn, model: Model, block_tokens: int, tokens: int, group: int = 0) -> Instance:
    """An engine with blocks of that size, and a request of so many tokens in it."""
    tp = draw(st.sampled_from(tp_sizes(model.heads)))
    inner = draw(st.sets(st.integers(1, model.layers - 1), max_size=2)) if model.layers > 1 else set()
    stages = [range(start, stop) for start, stop in pairwise([0, *sorted(inner), model.layers])]
    needed = -(-tokens // block_tokens)
    num_blocks = needed + draw(st.integers(0, 2))
    table = draw(st.permutations(range(num_blocks)))[:needed]
    if draw(st.booleans()):
        table = sorted(table)
    order = draw(st.sampled_from(["LBHN", "BLHN"] if group else ORDERS))
    pad = draw(st.sampled_from([0, 0, 5]))
    ranks = [
        make_rank(model, layers, heads_of(model, rank, tp), block_tokens, num_blocks, order, group, pad)
        for layers in stages
        for rank in range(tp)
    ]
    return Instance(model, ranks, list(table))
