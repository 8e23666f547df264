"""Mixes of KV-cache groups, as vLLM gives them to hybrid models: pages of all groups have as many bytes."""

from __future__ import annotations

from typing import Any

import oracle
import torch
from settings import indexer_names, layer_names
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

STATE_SHAPES = ((3, 4), (2, 2, 3))
"""Of a convolution and of what recurs, 48 bytes in fp16."""


def attention(block_tokens: int = 16, heads: int = 2) -> dict[str, Any]:
    return {
        "block_size": block_tokens,
        "num_kv_heads": heads,
        "head_size": oracle.HEAD_SIZE,
        "dtype": torch.float16,
    }


def full(block_tokens: int = 16, heads: int = 2) -> KVCacheSpec:
    return FullAttentionSpec(**attention(block_tokens, heads))


def window(tokens: int, block_tokens: int = 16, heads: int = 2) -> KVCacheSpec:
    return SlidingWindowSpec(**attention(block_tokens, heads), sliding_window=tokens)


def chunked(tokens: int, block_tokens: int = 16, heads: int = 2) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(**attention(block_tokens, heads), attention_chunk_size=tokens)


def state(block_tokens: int = 16, heads: int = 2, *, mode: str = "align", drafts: int = 0) -> KVCacheSpec:
    """Of a mixer; without prefix caching its mode is "none", and its one block is as long as any text.

    Where so many `drafts` are proposed in a step, it keeps a state after each of them.
    """
    return MambaSpec(
        block_size=block_tokens,
        shapes=STATE_SHAPES,
        dtypes=(torch.float16, torch.float16),
        page_size_padded=full(block_tokens, heads).page_size_bytes,
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def sparse(block_tokens: int = 16) -> UniformTypeKVCacheSpecs:
    """Of DeepSeek V3.2: a latent vector of each token, and an indexer's row, which vLLM has as one group."""
    rows = {"block_size": block_tokens, "num_kv_heads": 1, "max_tp_shards": 1}
    latent = MLAAttentionSpec(**rows, head_size=oracle.SLOT_ELEMENTS, dtype=torch.float16, is_index_group_leader=True)
    indexer = MLAAttentionSpec(
        **rows, head_size=oracle.SLOT_NBYTES, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    layers: dict[str, KVCacheSpec] = {}
    for first, second in zip(indexer_names(), layer_names(), strict=True):  # vLLM makes a layer's indexer first
        layers |= {first: indexer, second: latent}
    return UniformTypeKVCacheSpecs(block_size=block_tokens, kv_cache_specs=layers)


MIXES: dict[str, list[KVCacheSpec]] = {
    "window": [full(), window(20)],
    "windows": [window(40), full(), window(40)],
    "chunked": [full(), chunked(32)],
    "state": [full(), state(), state()],
    "all": [full(), window(33), state()],
}
