"""Latent KV with an indexer's cache beside it: sparse attention as of DeepSeek V3.2.

vLLM 0.32 keeps both in one group with one block table: a block has a row for each of its tokens in each layer, of the
latents (576 numbers, or 656 bytes where they are packed) and of the indexer (128 bytes in fp8 and a scale). Here they
are two groups with that one table, so each page of latents has its counterpart, and only both together are a hit.

Workers are given a description for each layer, the scheduler that of any one layer, and where the tensors of all lie.
What a row is made of nobody here has to know: groups are described by the bytes of a row, which both can tell.

Inside a block an indexer's values come first and all their scales behind them (DeepGEMM's format). So its pages are
whole blocks, and are those of instances with such blocks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole, UniformTypeKVCacheSpecs

from vllm_plugin.dtypes import eight_bit_name
from vllm_plugin.geometry import Group, Unsupported
from vllm_plugin.stages import layers_of, stages_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_INDEXER = ".indexer.k_cache"
"""How vLLM names an indexer's cache: `model.layers.3.self_attn.indexer.k_cache`."""


def has_indexer(layer_names: Sequence[str]) -> bool:
    return any(map(_is_indexer, layer_names))


def _is_indexer(layer_name: str) -> bool:
    return layer_name.endswith(_INDEXER)


def sparse_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[Group]:
    """The latents and the indexer of a model whose one group has both.

    Raises:
        Unsupported: the two processes would not see the same, or a hit could end inside a block.
    """
    (whole,) = kv_cache_config.kv_cache_groups
    parallel, spec = vllm_config.parallel_config, whole.kv_cache_spec
    block_tokens = spec.block_size
    aligned = getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or block_tokens
    rows = _rows(kv_cache_config)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        _check_layers(spec.kv_cache_specs, rows)
    stages = stages_of(vllm_config, kv_cache_config)
    reasons = {
        "vLLM did not say which layers other pipeline ranks have": stages is None,
        f"vLLM's own hits may end inside a block (of {block_tokens} tokens, hits of {aligned})": aligned < block_tokens,
    }
    for reason, holds in reasons.items():
        if holds:
            raise Unsupported(f"the model has an indexer, and {reason}")
    groups = []
    for is_indexer in (False, True):
        every = [[name for name in names if _is_indexer(name) == is_indexer] for (names,) in stages or ()]
        layers = layers_of([name for name in rows if _is_indexer(name) == is_indexer], every)
        sizes = {rows[name] for name in layers.own}
        if len(sizes) != 1:
            raise Unsupported(f"layers beside an indexer have rows of {sorted(sizes)} bytes; expected one size")
        groups.append(
            Group(
                layers=layers.numbers,
                num_layers=layers.count,
                num_kv_heads=1,
                k_dim=sizes.pop(),
                v_dim=0,
                itemsize=1,
                kv_dtype=f"indexer on {current_platform.device_name}" if is_indexer else _dtype_name(vllm_config),
                is_mla=True,
                block_tokens=block_tokens,
                layer_names=layers.own,
                tp_size=parallel.tensor_parallel_size,
                pp_size=parallel.pipeline_parallel_size,
                stages=layers.stages,
                in_whole_blocks=is_indexer,
            )
        )
    return groups


def _rows(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Bytes of a token in each layer, as vLLM laid the tensors out: a page follows the next of its layer or block."""
    (group,) = kv_cache_config.kv_cache_groups
    block_tokens, rows = group.kv_cache_spec.block_size, {}
    for tensor in kv_cache_config.kv_cache_tensors:
        nbytes, rest = divmod(min(tensor.layer_stride, tensor.block_stride), block_tokens)
        if rest:
            raise Unsupported(f"blocks of {min(tensor.layer_stride, tensor.block_stride)} bytes beside an indexer's")
        rows.update(dict.fromkeys(tensor.layers, nbytes))
    if missing := set(group.layer_names) - rows.keys():
        raise Unsupported(f"vLLM does not say where the cache of layer {min(missing)} lies")
    return rows


def _check_layers(specs: dict[str, KVCacheSpec], rows: dict[str, int]) -> None:
    """What a worker knows of each layer is what the scheduler takes for granted."""
    for name, spec in specs.items():
        is_plain = type(spec) is MLAAttentionSpec and spec.tokens_per_state == 1 and not spec.non_causal
        if not is_plain or (spec.cache_role is SparseCacheRole.INDEXER) != _is_indexer(name):
            raise Unsupported(f"layer {name} beside an indexer is {spec}")
        if spec.unpadded_page_size_bytes != rows[name] * spec.block_size:
            nbytes = spec.unpadded_page_size_bytes
            raise Unsupported(f"layer {name} beside an indexer has {rows[name]} bytes a token for blocks of {nbytes}")


def _dtype_name(vllm_config: VllmConfig) -> str:
    """Of the latents; workers pack some of these while they load the model, which the bytes of a row say."""
    configured = vllm_config.cache_config.cache_dtype.removesuffix("_ds_mla")
    computed = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return computed if configured == "auto" else eight_bit_name(configured)
