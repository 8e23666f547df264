"""What SGLang's controller finds of a prompt of the MLA checkpoint, held against the model's first layer, as JSON.

    latent_reader.py POOL TOKENS      the folder of the pool, and the prompt's token ids as JSON

SGLang cannot run an MLA model without a GPU, so the first layer's latent is computed here from the weights of the
checkpoint. vLLM's rotary kernel for the CPU turns the pairs of the rotary part further than their position says, 9
times as far for this model, so the lengths of the pairs are compared, which every rotation keeps. Run by the tests on
real servers in the environment of SGLang.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from controllers import Rank
from host_pools import axes, mla
from instances import server
from safetensors.torch import load_file
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.plugins import load_plugins

from models import checkpoint

LATENT, ROPE, EPSILON = 512, 64, 1e-6


def normalized(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm in float32."""
    values = values.float()
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.float()


def first_layer(tokens: list[int]) -> torch.Tensor:
    """`[token][latent | rotary part before its rotation]` of layer 0."""
    weights: dict[str, torch.Tensor] = {}
    for file in checkpoint("deepseek-mla").glob("*.safetensors"):
        weights |= load_file(file)
    layer = "model.layers.0."
    hidden = normalized(weights["model.embed_tokens.weight"][tokens], weights[layer + "input_layernorm.weight"])
    both = hidden @ weights[layer + "self_attn.kv_a_proj_with_mqa.weight"].float().T
    latent = normalized(both[:, :LATENT], weights[layer + "self_attn.kv_a_layernorm.weight"])
    return torch.cat([latent, both[:, LATENT:]], dim=-1)


def lengths(rows: torch.Tensor, *, neox: bool) -> torch.Tensor:
    """Of the pairs of elements that the rotary embedding turns: neighbours, or with `neox` those half a row apart."""
    pairs = rows[:, LATENT:]
    return pairs.view(-1, 2, ROPE // 2).norm(dim=1) if neox else pairs.view(-1, ROPE // 2, 2).norm(dim=2)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().mean() / expected.abs().mean())


def main(pool: Path, tokens: list[int]) -> dict[str, Any]:
    load_plugins()
    with server("deepseek-mla"):
        device = MLATokenToKVPool(64, 64, torch.bfloat16, LATENT, ROPE, 4, "cpu", False)
        host_pool = mla("page_first", latent=LATENT, rope=ROPE, page_tokens=64)
        rank = Rank(device, host_pool, pool, name="mooncake_connector")
        loaded, indices, _ = rank.load(tokens)
        other, _, _ = rank.load([tokens[0] ^ 1, *tokens[1:]])
    pages = torch.from_numpy(axes(rank.host_pool)[(indices[::64] // 64).tolist()]).view(torch.bfloat16).float()
    found = pages[:, 0, 0, :, 0].reshape(-1, LATENT + ROPE)
    expected = first_layer(tokens[:loaded])
    rank.detach()
    return {
        "loaded": loaded,
        "loaded_of_another_prompt": other,
        "latent_error": error(found[:, :LATENT], expected[:, :LATENT]),
        "rope_error": error(lengths(found, neox=False), lengths(expected, neox=False)),
        "rope_error_of_the_other_pairing": error(lengths(found, neox=True), lengths(expected, neox=True)),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
