"""Models whose layers do not all keep full attention, with random weights: windows of 128 tokens, or a recurrent state.

`tests/e2e/hybrid/` asks them in the real vLLM, which keeps them in blocks of 128 tokens, Qwen3-Next in blocks of 256.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.random_weights import EOS, VOCAB, write_random

WINDOW = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def make_gemma3(folder: Path) -> None:
    """Gemma 3: two windows to each layer of full attention, 6 layers; vLLM makes three groups of two."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        **_COMMON,
        intermediate_size=1024,
        num_hidden_layers=6,
        layer_types=[_SLIDING, _SLIDING, _FULL] * 2,
        sliding_window=WINDOW,
        query_pre_attn_scalar=64,
        tie_word_embeddings=True,
    )

    def adjust(model: Any) -> None:  # otherwise its own embedding is what stands out, and every token answers itself
        model.get_input_embeddings().weight /= 8
        model.model.norm.weight += 20

    write_random(folder, config, seed=11, std=0.04, adjust=adjust)


def make_gpt_oss(folder: Path) -> None:
    """gpt-oss: windows and full attention by turns with sinks, 4 experts of which 2 compute a token; two groups."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        **_COMMON,
        intermediate_size=512,
        num_hidden_layers=4,
        layer_types=[_SLIDING, _FULL] * 2,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    write_random(folder, config, seed=12, std=0.04)


def make_qwen3_next(folder: Path) -> None:
    """Qwen3-Next: three layers of gated delta rule (GDN) to one of full attention; three groups of states, one full."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        **_COMMON,
        intermediate_size=1024,
        num_hidden_layers=4,
        layer_types=[_LINEAR, _LINEAR, _LINEAR, _FULL],
        linear_num_value_heads=8,
        linear_num_key_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        tie_word_embeddings=False,
    )

    def adjust(model: Any) -> None:
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.A_log.fill_(-6.0)  # a state that forgets within some hundred tokens, not at once
            else:
                layer.self_attn.q_norm.weight += 2.0  # few tokens stand out, so that each page can be what matters

    write_random(folder, config, seed=13, std=0.04, adjust=adjust)


def make_cohere2(folder: Path) -> None:
    """Cohere 2: three windows with rope to each layer of full attention without it; four groups of one layer."""
    from transformers import Cohere2Config

    common = {name: value for name, value in _COMMON.items() if name != "head_dim"}
    config = Cohere2Config(
        **common,
        intermediate_size=1024,
        num_hidden_layers=4,
        layer_types=[_SLIDING, _SLIDING, _SLIDING, _FULL],
        sliding_window=WINDOW,
        logit_scale=1.0,
        tie_word_embeddings=True,
    )
    write_random(folder, config, seed=14, std=0.04)
