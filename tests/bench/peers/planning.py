"""Planning of a long request between ranks of different TP size: arithmetic alone, no memory is touched."""

from __future__ import annotations

import random

from bench.peers.report import Goal, Row, row
from mooncake_connector.cli.bench.measure import Task, best_seconds
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.page import BlockLayout, SegmentLayout
from transfer.plan.layout import RankLayout, Section
from transfer.plan.pairing import pair_sections, routes

_LAYERS, _HEADS, _DIM, _ITEMSIZE = 80, 8, 128, 2
_BLOCK_TOKENS, _TOKENS = 16, 131_072


def planning_row(rounds: int) -> Row:
    figure = "planning 128k tokens, 80 layers, TP 4 to TP 8: what one source rank sends to one destination"
    return row(figure, seconds(rounds) * 1e3, "ms", goal=Goal(at_most=20))


def seconds(rounds: int) -> float:
    """Best time for all copies from one rank of TP 4 to one of TP 8, both with block tables in random order."""
    sources, destinations = [_rank(4, number) for number in range(4)], [_rank(8, number) for number in range(8)]
    tables = [random.Random(seed).sample(range(_TOKENS // _BLOCK_TOKENS), _TOKENS // _BLOCK_TOKENS) for seed in (1, 2)]

    def plan() -> None:
        route = next(route for route in routes(sources, destinations) if any(route.parts))
        _, pairing = pair_sections(sources[route.source], destinations[route.destination], route.parts)[0]
        pairing.copies(pairing.layers, 0, _TOKENS, tables[0], tables[1])

    return best_seconds({"plan": Task(plan)}, rounds)["plan"]


def _rank(size: int, number: int) -> RankLayout:
    """Rank `number` of `size`: a block is `[head][token][K | V]`, each layer is memory of its own."""
    heads = _HEADS // size
    vector = _DIM * _ITEMSIZE
    head_nbytes = _BLOCK_TOKENS * 2 * vector
    num_blocks = _TOKENS // _BLOCK_TOKENS
    token, dim = ((_BLOCK_TOKENS, 2 * vector),), ((_DIM, _ITEMSIZE),)
    blocks = BlockLayout(
        layer_addresses=tuple(4096 + layer * num_blocks * heads * head_nbytes for layer in range(_LAYERS)),
        num_blocks=num_blocks,
        block_tokens=_BLOCK_TOKENS,
        block_stride=heads * head_nbytes,
        head_stride=head_nbytes,
        k=SegmentLayout(0, token, dim),
        v=SegmentLayout(vector, token, dim),
    )
    shard = Shard(0, _LAYERS, number * heads, (number + 1) * heads)
    return RankLayout((Section("kv", _LAYERS, _HEADS, shard, _DIM, _DIM, _ITEMSIZE, blocks),))
