"""What this vLLM instance keeps as KV cache: groups of layers, and the shards of their pages that ranks hold.

vLLM divides a model's layers into *groups*: one where all keep every token, several where some keep a sliding window
(hybrid models). Each group has a block table of its own; block ids are shared, so a block is one group's at a time.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from vllm.distributed.utils import get_pp_indices

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace, canonical_json
from mooncake_connector.kv.page import PageFormat
from vllm_plugin.unsupported import Unsupported as Unsupported

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec

_TRANSFER_FORMAT = 2
"""Raised whenever the same bytes of a transfer would mean something else."""


_SMALLEST_PAGE = 16
"""Tokens; smaller pages cost more to look up than they bring."""

_OF_ONE_RANK = ("ranks", "shapes")
"""What a state's identity says of its split. Sections of transfers say it too, in refusals with both sides' values."""


Kind = Literal["full", "window", "chunked", "state"]
"""What a group's layers go on from: every token before, the last ones, those since the chunk began, or a state."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a block table, over all ranks.

    Args:
        index: the group's number in vLLM's KV cache configuration, and so of its block table.
        spec: vLLM's description of its blocks, which says how vLLM manages them.
        span: tokens of the window or the chunk; None for full attention.
        layers: the model's numbers of its layers, in order; only a group among several is named by them.
        num_layers, num_kv_heads, k_dim, v_dim, itemsize: of these layers; MLA has one head and v_dim 0.
        kv_dtype: the name the namespace carries.
        block_tokens: tokens a block of the engine.
        layer_names: vLLM's names of this rank's layers, in layer order.
        tp_size, pp_size: ranks.
        stages: how many of these layers each stage of the pipeline has, which may be none; empty for a group that is
            the whole model, whose layers vLLM divides evenly.
        in_whole_blocks: whether a token's bytes are found only where all of its block's are: pages are whole blocks.
    """

    index: int = 0
    spec: AttentionSpec | None = field(default=None, repr=False)
    kind: Kind = "full"
    span: int | None = None
    layers: tuple[int, ...] = ()
    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    itemsize: int
    kv_dtype: str
    is_mla: bool
    block_tokens: int
    layer_names: tuple[str, ...]
    tp_size: int
    pp_size: int
    stages: tuple[int, ...] = ()
    in_whole_blocks: bool = False

    def shard(self, pp_rank: int, tp_rank: int) -> Shard | None:
        """The part of a page that one rank holds, if it has any layers; these are counted within the group."""
        first, stop = self._layers(pp_rank)
        return Shard(first, stop, *self.heads(tp_rank)) if first < stop else None

    def _layers(self, pp_rank: int) -> tuple[int, int]:
        if self.stages:
            return sum(self.stages[:pp_rank]), sum(self.stages[: pp_rank + 1])
        return (0, self.num_layers) if self.pp_size == 1 else get_pp_indices(self.num_layers, pp_rank, self.pp_size)

    def heads(self, tp_rank: int) -> tuple[int, int]:
        """The KV heads of one rank, as a half-open range."""
        if self.num_kv_heads >= self.tp_size:
            count = self.num_kv_heads // self.tp_size
            return tp_rank * count, (tp_rank + 1) * count
        first = tp_rank * self.num_kv_heads // self.tp_size
        return first, first + 1  # more ranks than heads: vLLM replicates, consecutive ranks hold the same head

    def is_writer(self, tp_rank: int) -> bool:
        """Whether this rank stores its shard: of ranks that hold the same heads, one writes."""
        return tp_rank == 0 or self.heads(tp_rank) != self.heads(tp_rank - 1)

    def shards(self) -> list[Shard]:
        """Every distinct shard: a page is a hit where all of them are."""
        ranks = [(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]
        return list(dict.fromkeys(shard for pp, tp in ranks if (shard := self.shard(pp, tp)) is not None))

    @property
    def whole(self) -> Shard:
        """What an instance of one rank holds."""
        return Shard(0, self.num_layers, 0, self.num_kv_heads)

    def page_format(self, shard: Shard, page_tokens: int) -> PageFormat:
        return PageFormat(shard.num_layers, page_tokens, shard.num_heads, self.k_dim, self.v_dim, self.itemsize)

    def first_kept(self, num_tokens: int) -> int:
        """With so many tokens computed, the first that a later one attends to."""
        if self.span is None:
            return 0
        if self.kind == "chunked":
            return num_tokens // self.span * self.span
        return max(0, num_tokens - self.span + 1)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What makes bytes of this group mean something else than those of another group of the model."""
        names = ["kind", "span", "num_kv_heads", "k_dim", "v_dim", "itemsize", "kv_dtype"]
        names += ["block_tokens"] * self.in_whole_blocks
        return {name: getattr(self, name) for name in names} | {"layers": list(self.layers)}


@dataclass(frozen=True)
class Geometry:
    """The KV cache of this instance, over all ranks.

    Args:
        groups: those that are stored and handed over; a model whose layers all attend to everything has one. Those of
            full attention come first.
        tp_size, pp_size: ranks.
        retention_tokens: how often vLLM's own cache keeps what a group with a window needs to go on: at every boundary
            of blocks (None), at the end of prompts (0), or also once in so many tokens.
        zeroes_blocks: whether vLLM zeroes blocks that a step gives to another request. Model Runner V2 does so before
            the connector hears of that step, so no block is read after the step that computed it.
    """

    groups: tuple[Group, ...]
    tp_size: int
    pp_size: int
    retention_tokens: int | None = None
    zeroes_blocks: bool = False

    @property
    def is_hybrid(self) -> bool:
        return len(self.groups) > 1

    @property
    def main(self) -> Group:
        """The group that stands for the model: of full attention."""
        return self.groups[0]

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    def unit_tokens(self, page_tokens: int) -> int:
        """What all groups' blocks and pages have in common: a hit ends at multiples of it and fills whole blocks."""
        return math.lcm(page_tokens, *(group.block_tokens for group in self.groups))

    def fitting_page(self, page_tokens: int) -> int:
        """A page, no larger than this one, with which a hit of a hybrid model may end wherever its blocks do.

        vLLM makes blocks as large as a state, of 544 tokens for instance, and keeps a state at their end alone.
        """
        blocks = self.unit_tokens(1)
        if not self.is_hybrid or blocks <= page_tokens or not blocks % page_tokens:
            return page_tokens
        fitting = (tokens for tokens in range(page_tokens, _SMALLEST_PAGE - 1, -1) if not blocks % tokens)
        return next(fitting, page_tokens)

    def check_page(self, page_tokens: int) -> None:
        """Raises Unsupported where pages of so many tokens would cut what is of use as a whole only."""
        for group in self.groups:
            if group.in_whole_blocks and page_tokens % group.block_tokens:
                raise Unsupported(
                    f"the model has an indexer, and pages of {page_tokens} tokens would cut its blocks of "
                    f"{group.block_tokens}; set page_tokens to a multiple of {group.block_tokens}"
                )

    def group_namespace(self, namespace: Namespace, group: int) -> Namespace:
        """The namespace of one of the groups (its position in `groups`); of a model with one group, the instance's."""
        return _of_group(namespace, canonical_json(self.groups[group].identity)) if self.is_hybrid else namespace

    def compatibility(self) -> bytes:
        """Digest of what must be equal for KV to mean the same. The weights are part of each transfer's name."""
        main = self.main
        fields = ("num_kv_heads", "k_dim", "v_dim", "itemsize", "kv_dtype", "is_mla")
        described = {name: getattr(main, name) for name in fields} | {"num_layers": self.num_layers}
        if self.is_hybrid:
            described["groups"] = [
                {name: value for name, value in group.identity.items() if name not in _OF_ONE_RANK}
                for group in self.groups
            ]
        described |= {"engine": "vllm", "format": _TRANSFER_FORMAT}
        return hashlib.sha256(canonical_json(described).encode()).digest()


@lru_cache(maxsize=64)
def _of_group(namespace: Namespace, group: str) -> Namespace:
    return replace(namespace, group=group)
