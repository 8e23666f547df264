"""Checkpoints of real architectures with random weights: small, fast, and of the shapes that the tests need.

A random model is of use only while its text depends on its whole context, and not on the last bit of it: with too
narrow weights it repeats one token whatever the prompt says, with too wide ones it is chaotic, and the rounding of
another batch shows. With the deviations below another first page changed the text of every prompt tried, while the same
prompt computed along two paths (DeepSeek's prefill and decode) kept the likely log-probabilities within 0.05.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

EOS = 256
VOCAB = 257  # one token for each byte, and the end of the text


def make_qwen3(folder: Path, *, seed: int, std: float = 0.04) -> None:
    """Qwen3: 8 layers, 8 query and 4 KV heads of 64, so that TP=2 divides it; 8 KiB of KV a token in bfloat16."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    write_random(folder, config, seed=seed, std=std)


def make_deepseek_mla(folder: Path, *, seed: int, std: float = 0.025) -> None:
    """DeepSeek-V2 with multi-head latent attention and dense layers only: latent 512 and rope 64 wide, 4 layers."""
    from transformers import DeepseekV2Config

    layers = 4
    config = DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=EOS,
        tie_word_embeddings=False,
    )
    write_random(folder, config, seed=seed, std=std)


def write_random(
    folder: Path, config: Any, *, seed: int, std: float, adjust: Callable[[Any], None] | None = None
) -> None:
    """Draw every matrix from a normal of deviation `std`, leave vectors as the architecture begins with, and save.

    Of the vectors norms begin with what changes nothing, be it ones or zeros, and decay rates with its own draw.
    `adjust` changes what makes the text of such a model depend on too little.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        if adjust is not None:
            adjust(model)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)


def _byte_tokenizer() -> Any:
    """Token i is byte i, without merges: a text of n bytes has n tokens, which makes exact lengths easy to write."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: index for index, character in enumerate(_byte_characters())}
    vocab["<|end|>"] = EOS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def _byte_characters() -> list[str]:
    """The printable stand-in that GPT-2's byte-level alphabet has for each of the 256 bytes, by byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
