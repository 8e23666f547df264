"""Whether the pool may be used with a model and its settings, and how the model's KV cache is read.

Reads vLLM's configuration only; it neither touches memory nor the pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_plugin.dtypes import eight_bit_name
from vllm_plugin.geometry import Geometry, Group, Kind, Unsupported
from vllm_plugin.indexers import has_indexer, sparse_groups
from vllm_plugin.stages import Layers, layers_of, stages_of
from vllm_plugin.states import read_states

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_KINDS: dict[type[KVCacheSpec], Kind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "window",
    ChunkedLocalAttentionSpec: "chunked",
    MambaSpec: "state",
}
_SPANS = {SlidingWindowSpec: "sliding_window", ChunkedLocalAttentionSpec: "attention_chunk_size"}
_NO_SPAN = {"sliding_window": None, "attention_chunk_size": None}
"""Layers that compute with a window, while vLLM keeps every token of them, have blocks like all others."""


def read_geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """Geometry of the instance.

    Raises:
        Unsupported: a hit needs what every group of layers goes on from, so one group that is not understood (such as
            packed caches) leaves the whole model alone; likewise context parallelism.
    """
    parallel, described = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    _check_settings(vllm_config)
    is_sparse = len(described) == 1 and has_indexer(described[0].layer_names)
    if is_sparse:
        groups = sparse_groups(vllm_config, kv_cache_config)
    else:
        _check_groups(kv_cache_config)
        groups = [
            _read_group(vllm_config, index, _one_spec(group.kv_cache_spec), layers)
            for index, (group, layers) in enumerate(zip(described, _layers(vllm_config, kv_cache_config), strict=True))
        ]
    groups.sort(key=lambda group: group.kind != "full")
    return Geometry(
        tuple(groups),
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        kv_cache_config.prefix_cache_retention_interval,
        kv_cache_config.needs_kv_cache_zeroing and not is_sparse,  # as the scheduler sees it
    )


def _layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Layers]:
    """Those of each group. Of a model with one group the other stages' do not matter: vLLM divides it evenly.

    Raises:
        Unsupported: of one with several the other stages' layers are not known, or not in order.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return [layers_of(groups[0].layer_names, [groups[0].layer_names])]
    stages = stages_of(vllm_config, kv_cache_config)
    if stages is None:
        raise Unsupported(
            f"the model has {len(groups)} KV-cache groups on several pipeline ranks, and vLLM did not say which layers "
            "the others have: the plugin has to be loaded in vLLM's EngineCore before that makes its KV cache"
        )
    if not all(any(stage) for stage in stages):
        raise Unsupported("a stage of the pipeline has no layer with a KV cache")
    return [layers_of(group.layer_names, [stage[at] for stage in stages]) for at, group in enumerate(groups)]


def _check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Raises Unsupported where one of the groups, or their being several, is in the way."""
    groups = kv_cache_config.kv_cache_groups
    specs = [_one_spec(group.kv_cache_spec) for group in groups]
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
    if any(type(spec) not in _KINDS for spec in specs):
        raise Unsupported(f"its KV cache is {kinds}; only full attention, windows, chunks and states are stored")
    if all(_KINDS[type(spec)] != "full" for spec in specs):
        raise Unsupported(f"its KV cache is {kinds}; one group at least has to keep every token")
    if len(groups) == 1:
        return
    states, sizes = any(_KINDS[type(spec)] == "state" for spec in specs), sorted({spec.block_size for spec in specs})
    aligned = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or sizes[-1]
    reasons = {
        f"vLLM's own hits may end inside a block of states (blocks of {sizes} tokens, hits of {aligned})": states
        and (len(sizes) > 1 or aligned < sizes[-1]),
        "an indexer is in one of them": any(has_indexer(group.layer_names) for group in groups),
        "a group is not part of what vLLM caches or hands over": len(kv_cache_config.prefix_cacheable_groups)
        != len(groups),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(f"the model has {len(groups)} KV-cache groups ({kinds}), and {reason}")


def _one_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """What all layers of a group have; vLLM's workers may be given one description a layer."""
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return spec
    first, *others = spec.kv_cache_specs.values()
    blocks = [replace(one, **_NO_SPAN) if isinstance(one, FullAttentionSpec) else one for one in (first, *others)]
    if any(one != blocks[0] for one in blocks):
        raise Unsupported(f"layers of one KV-cache group differ in shape (UniformTypeKVCacheSpecs of {len(blocks)})")
    return first


def _read_group(vllm_config: VllmConfig, index: int, one: KVCacheSpec, layers: Layers) -> Group:
    """Raises Unsupported where the blocks of the group are not understood."""
    if isinstance(one, MambaSpec):
        return read_states(vllm_config, index, one, layers)
    spec = cast("AttentionSpec", one)
    _check_spec(spec)
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    is_mla, is_known = isinstance(spec, MLAAttentionSpec), pp_size == 1 or bool(layers.stages)
    return Group(
        index=index,
        spec=spec,
        kind=_KINDS[type(spec)],
        span=getattr(spec, _SPANS[type(spec)]) if type(spec) in _SPANS else None,
        layers=layers.numbers,
        num_layers=layers.count if is_known else vllm_config.model_config.get_total_num_hidden_layers(),
        num_kv_heads=1 if is_mla else _num_kv_heads(vllm_config, spec),
        k_dim=spec.head_size,
        v_dim=0 if is_mla else spec.head_size_v,
        itemsize=torch.empty((), dtype=spec.dtype).element_size(),
        kv_dtype=_kv_dtype_name(vllm_config, spec),
        is_mla=is_mla,
        block_tokens=spec.block_size,
        layer_names=layers.own,
        tp_size=tp_size,
        pp_size=pp_size,
        stages=layers.stages,
    )


def _num_kv_heads(vllm_config: VllmConfig, spec: AttentionSpec) -> int:
    """KV heads of a group over all ranks, of which vLLM says how many one rank has."""
    heads, tp_size = vllm_config.model_config.get_total_num_kv_heads(), vllm_config.parallel_config.tensor_parallel_size
    if tp_size == 1:
        return spec.num_kv_heads
    if heads >= tp_size and heads % tp_size:
        raise Unsupported(f"{heads} KV heads are not divided evenly by {tp_size} TP ranks")
    if spec.num_kv_heads != max(1, heads // tp_size):
        raise Unsupported(f"layers with {spec.num_kv_heads} KV heads a rank in a model with {heads} on {tp_size} ranks")
    return heads


def _check_settings(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    context_parallel = parallel.decode_context_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    if context_parallel > 1:
        raise Unsupported("context parallelism splits the tokens of a block over ranks")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise Unsupported(
            "with the external launcher each rank has a scheduler of its own, which hears of its own pages alone; "
            "ranks would compute different batches and wait for each other for ever"
        )
    if vllm_config.model_config.pooler_config is not None and not vllm_config.model_config.is_prefix_caching_supported:
        raise Unsupported("its pooling needs what the model says of every token of a prompt")


def _check_spec(spec: AttentionSpec) -> None:
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None or spec.tokens_per_state != 1
    reasons = {
        "non-causal attention makes KV depend on later tokens": getattr(spec, "non_causal", False),
        "the KV cache has a packed format that is not K beside V": packed,
        f"KV quantisation {spec.kv_quant_mode.name} keeps scales outside the page": spec.kv_quant_mode
        not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR),
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(reason)


def _kv_dtype_name(vllm_config: VllmConfig, spec: AttentionSpec) -> str:
    """The namespace's dtype name; vLLM says "auto" for the model's own and "fp8" for e4m3, and may leave out layers."""
    configured = vllm_config.cache_config.cache_dtype
    if configured.startswith("fp8") and spec.dtype.itemsize == 1:
        return eight_bit_name(configured)
    return str(spec.dtype).removeprefix("torch.")
