"""vLLM's rotary embedding in plain torch."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate `query` and `key`, [tokens, heads * head_size], in place.

    `cos_sin_cache` is [positions, rotated dims]: the cosines, then the sines. `is_neox` pairs dim i with dim
    i + half, otherwise neighbours are pairs.
    """
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)[..., : cos_sin_cache.shape[-1]]
        if is_neox:
            first, second = heads.chunk(2, dim=-1)
        else:
            first, second = heads[..., ::2], heads[..., 1::2]
        rotated = first.float() * cos - second.float() * sin, second.float() * cos + first.float() * sin
        first.copy_(rotated[0])
        second.copy_(rotated[1])
