"""What a model keeps as KV for a token, read from its `config.json` alone, as `transformers` names the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_connector.config.file import read_text
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.page import PageFormat

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e4m3fnuz": 1, "fp8_e5m2": 1}
"""Bytes of an element by the name of a KV dtype."""
_MOST_NBYTES = 64 << 20
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "num_kv_heads", "n_head_kv", "num_attention_groups")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_STATE = (
    "mamba_d_state", "ssm_cfg", "hybrid_override_pattern", "full_attention_interval", "linear_num_key_heads",
    "linear_attn_config", "attn_type_list", "attention_chunk_size",
)  # fmt: skip
"""Fields of models that keep a state beside KV, or only a part of it."""
_UNCLEAR = ("attn_config", "block_configs")
"""Fields that describe the heads in ways of their own."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Layers, KV heads (1 for MLA), elements of K and V a token and head (V: 0 for MLA), and the model's dtype.

    A model in float32 counts as bfloat16, in which engines serve it unless told otherwise.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str

    def page_format(self, page_tokens: int, kv_dtype: str | None = None) -> PageFormat:
        """A page of all layers and heads; `kv_dtype` is a key of ITEMSIZES, None for the model's own.

        Raises ModelIdentityError where the model's own is not known.
        """
        itemsize = ITEMSIZES.get(kv_dtype or self.dtype)
        if itemsize is None:
            known = "|".join(ITEMSIZES)
            raise ModelIdentityError(f"dtype {self.dtype!r} is not known: name the KV cache's with --kv-dtype {known}")
        return PageFormat(self.num_layers, page_tokens, self.num_kv_heads, self.k_dim, self.v_dim, itemsize)


def read_shape(model: Path) -> ModelShape:
    """The shape of the model in this folder, or that a file like `config.json` describes.

    Raises ModelIdentityError, which names the file, where it is missing or no configuration, and where the model keeps
    more than the KV of full attention: pages of such a model are not stored.
    """
    file = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(read_text(file, _MOST_NBYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        hint = "give the folder of its checkpoint"
        raise ModelIdentityError(f"{file} cannot be read as a model's config.json: {reason}; {hint}") from None
    if not isinstance(config, dict):
        raise ModelIdentityError(f"{file} holds no object: expected a model's config.json")
    text = config.get("text_config")
    try:
        return _shape({**config, **text} if isinstance(text, dict) else config)
    except ValueError as error:
        raise ModelIdentityError(f"{file}: {error}") from None


def _shape(config: Mapping[str, Any]) -> ModelShape:
    _check_served(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = "bfloat16" if dtype == "float32" else dtype
    layers = _number(config, _LAYERS)
    if config.get("kv_lora_rank"):
        latent, rope = _number(config, ("kv_lora_rank",)), _number(config, ("qk_rope_head_dim",))
        return ModelShape(layers, 1, latent + rope, 0, dtype)
    heads = _number(config, _HEADS)
    one_head = config.get("multi_query") is True and not config.get("new_decoder_architecture")
    kv_heads = 1 if one_head else _number(config, _KV_HEADS, heads)
    head_dim = _number(config, ("head_dim",), 0) or _number(config, _HIDDEN) // heads
    if not head_dim:
        raise ValueError(f"it has no head_dim, and fewer elements ({' or '.join(_HIDDEN)}) than attention heads")
    return ModelShape(layers, kv_heads, head_dim, _number(config, ("v_head_dim",), head_dim), dtype)


def _check_served(config: Mapping[str, Any]) -> None:
    kinds = config.get("layer_types")
    other = sorted({str(kind) for kind in kinds} - {"full_attention", "attention"}) if isinstance(kinds, list) else []
    windows = config.get("sliding_window") and config.get("use_sliding_window", True) and kinds is None
    state = [name for name in _STATE if config.get(name)]
    if other or windows or state:
        what = ", ".join(other or (["sliding_window"] if windows else state))
        raise ValueError(f"the model has {what}: only models with full attention in every layer (or MLA) are stored")
    if unclear := [name for name in _UNCLEAR if config.get(name)]:
        raise ValueError(f"its {unclear[0]} is not understood: `store ls` shows what its pages take once it has run")


def _number(config: Mapping[str, Any], names: Sequence[str], default: int | None = None) -> int:
    """The first of these fields that is set. Raises ValueError where none is a positive number."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or not 0 < value < 1 << 32:
                raise ValueError(f"{name} is {value!r}: expected a number of at least 1")
            return value
    if default is None:
        raise ValueError(f"it has no {' or '.join(names)}")
    return default
