"""What this vLLM instance keeps as KV cache: groups of layers, their shards, and whether the pool may be used at all.

vLLM divides a model's layers into *groups*: one where all keep every token, several where some keep a sliding window
(hybrid models). Each group has a block table of its own; block ids are shared, so a block is one group's at a time.

Reads vLLM's configuration only; it neither touches memory nor the pool.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.distributed.utils import get_pp_indices
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.namespace import Namespace, canonical_json
from mooncake_connector.kv.page import PageFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_TRANSFER_FORMAT = 2
"""Raised whenever the same bytes of a transfer would mean something else."""


class Unsupported(Exception):
    """Why the pool cannot serve this model or setting; the text is the one log line a person sees."""


Kind = Literal["full", "window", "chunked", "state"]
"""What a group's layers go on from: every token before, the last ones, those since the chunk began, or a state."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that share a block table, over all ranks.

    Args:
        index: the group's number in vLLM's KV cache configuration, and so of its block table.
        span: tokens of the window or the chunk; None for full attention.
        layers: the model's numbers of its layers, in order; only a group among several is named by them.
        num_layers, num_kv_heads, k_dim, v_dim, itemsize: of these layers; MLA has one head and v_dim 0.
        kv_dtype: the name the namespace carries.
        block_tokens: tokens a block of the engine.
        layer_names: vLLM's names of this rank's layers, in layer order.
        tp_size, pp_size: ranks.
    """

    index: int = 0
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

    def shard(self, pp_rank: int, tp_rank: int) -> Shard:
        """The part of a page that one rank holds; layers are counted within the group."""
        one_stage = self.pp_size == 1
        layers = (0, self.num_layers) if one_stage else get_pp_indices(self.num_layers, pp_rank, self.pp_size)
        if self.num_kv_heads >= self.tp_size:
            count = self.num_kv_heads // self.tp_size
            first = tp_rank * count
        else:  # more ranks than heads: vLLM replicates, consecutive ranks hold the same head
            count, first = 1, tp_rank * self.num_kv_heads // self.tp_size
        return Shard(layers[0], layers[1], first, first + count)

    def is_writer(self, tp_rank: int) -> bool:
        """Whether this rank stores its shard: of ranks that hold the same heads, one writes."""
        return tp_rank == 0 or self.shard(0, tp_rank) != self.shard(0, tp_rank - 1)

    def shards(self) -> list[Shard]:
        """Every distinct shard: a page is a hit where all of them are."""
        ranks = [(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]
        return list(dict.fromkeys(self.shard(pp, tp) for pp, tp in ranks))

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
        names = ("kind", "span", "num_kv_heads", "k_dim", "v_dim", "itemsize", "kv_dtype")
        return {name: getattr(self, name) for name in names} | {"layers": list(self.layers)}


@dataclass(frozen=True)
class Geometry:
    """The KV cache of this instance, over all ranks.

    Args:
        groups: those that are stored and handed over; a model whose layers all attend to everything has one.
        tp_size, pp_size: ranks.
    """

    groups: tuple[Group, ...]
    tp_size: int
    pp_size: int

    @property
    def is_hybrid(self) -> bool:
        return len(self.groups) > 1

    @cached_property
    def main(self) -> Group:
        """The group that stands for the model: a full attention's, where there is one."""
        return min(self.groups, key=lambda group: group.kind != "full")

    @property
    def num_layers(self) -> int:
        return sum(group.num_layers for group in self.groups)

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    def group_namespace(self, namespace: Namespace, group: int) -> Namespace:
        """The namespace of one of the groups (its position in `groups`); of a model with one group, the instance's."""
        return _of_group(namespace, canonical_json(self.groups[group].identity)) if self.is_hybrid else namespace

    def compatibility(self) -> bytes:
        """Digest of what must be equal for KV to mean the same. The weights are part of each transfer's name."""
        main = self.main
        fields = ("num_kv_heads", "k_dim", "v_dim", "itemsize", "kv_dtype", "is_mla")
        described = {name: getattr(main, name) for name in fields} | {"num_layers": self.num_layers}
        if self.is_hybrid:
            described["groups"] = [group.identity for group in self.groups]
        described |= {"engine": "vllm", "format": _TRANSFER_FORMAT}
        return hashlib.sha256(canonical_json(described).encode()).digest()


@lru_cache(maxsize=64)
def _of_group(namespace: Namespace, group: str) -> Namespace:
    return replace(namespace, group=group)


def read_geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """Geometry of the instance.

    Raises:
        Unsupported: a hit needs the state of every layer, so a model with sliding-window, Mamba or other state beside
            full attention has no page that could stand for a prefix; likewise context parallelism and packed caches.
    """
    parallel = vllm_config.parallel_config
    spec, layer_names = _full_attention_group(kv_cache_config)
    _check_spec(vllm_config, spec)
    is_mla = isinstance(spec, MLAAttentionSpec)
    heads = 1 if is_mla else vllm_config.model_config.get_total_num_kv_heads()
    if heads >= parallel.tensor_parallel_size and heads % parallel.tensor_parallel_size:
        raise Unsupported(f"{heads} KV heads are not divided evenly by {parallel.tensor_parallel_size} TP ranks")
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    num_layers = len(layer_names) if pp_size == 1 else vllm_config.model_config.get_total_num_hidden_layers()
    group = Group(
        num_layers=num_layers,
        num_kv_heads=heads,
        k_dim=spec.head_size,
        v_dim=0 if is_mla else spec.head_size_v,
        itemsize=torch.empty((), dtype=spec.dtype).element_size(),
        kv_dtype=_kv_dtype_name(vllm_config, spec),
        is_mla=is_mla,
        block_tokens=spec.block_size,
        layer_names=layer_names,
        tp_size=tp_size,
        pp_size=pp_size,
    )
    return Geometry((group,), tp_size, pp_size)


def _full_attention_group(kv_cache_config: KVCacheConfig) -> tuple[FullAttentionSpec, tuple[str, ...]]:
    groups = kv_cache_config.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1:
        raise Unsupported(
            f"the model has {len(groups)} KV-cache groups ({', '.join(kinds)}); a hit needs the state of all of them"
        )
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise Unsupported(f"its KV cache is {kinds[0]}; only full attention (GQA, MHA, MLA) is stored")
    return spec, tuple(sorted(groups[0].layer_names, key=_layer_order))


def _layer_order(name: str) -> tuple[int, ...]:
    """Numbers of a layer's name: `model.layers.10.self_attn.attn` comes after `model.layers.9.self_attn.attn`."""
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _check_spec(vllm_config: VllmConfig, spec: FullAttentionSpec) -> None:
    parallel = vllm_config.parallel_config
    context_parallel = parallel.decode_context_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1
    reasons = {
        "context parallelism splits the tokens of a block over ranks": context_parallel > 1,
        "chunked local attention keeps only part of a prefix": spec.attention_chunk_size is not None,
        "non-causal attention makes KV depend on later tokens": spec.non_causal,
        "the KV cache has a packed format that is not K beside V": packed,
        "KV scales computed at run time differ between instances": bool(
            getattr(vllm_config.cache_config, "calculate_kv_scales", False)
        ),
        f"KV quantisation {spec.kv_quant_mode.name} keeps scales outside the page": spec.kv_quant_mode
        not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)


def _kv_dtype_name(vllm_config: VllmConfig, spec: FullAttentionSpec) -> str:
    """The namespace's dtype name; vLLM says "auto" for the model's own and "fp8" for e4m3."""
    configured = vllm_config.cache_config.cache_dtype
    if configured.startswith("fp8"):
        return {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}.get(configured, configured)
    return str(spec.dtype).removeprefix("torch.")
