"""Whose pages these are: the namespace of this vLLM instance.

Everything that changes KV bytes enters it, or the chain root of a request (`naming.py`). Nothing here touches the pool.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.model_executor.model_loader.utils import get_draft_load_config

from mooncake_connector.config.schema import Config
from mooncake_connector.kv.identity.checkpoint import (
    is_from_elsewhere,
    plain_values,
    quantization_while_loading,
    rope_in_force,
    weights_digest,
)
from mooncake_connector.kv.identity.model import files_digest, without_volatile
from mooncake_connector.kv.namespace import Namespace, canonical_json
from vllm_plugin.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

_QUANTISE = (
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
)
"""Variables that have vLLM quantise weights, what layers are given, or sums over ranks."""


def instance_namespace(vllm_config: VllmConfig, geometry: Geometry, config: Config) -> Namespace:
    """The namespace of an instance. Reads all weight files the first time it meets them: seconds for a large model.

    Of a model with several groups it is what the namespaces of the groups have in common (`Geometry.group_namespace`).

    Raises:
        ModelIdentityError: the model's files cannot be found; the text says to set `model_id`.
    """
    model = vllm_config.model_config
    hf, main = model.hf_text_config, geometry.main
    return Namespace(
        model_name=str(model.model),
        model_digest=config.model_id or _weights_digest(model, vllm_config.load_config),
        kv_dtype=main.kv_dtype,
        num_layers=geometry.num_layers,
        num_kv_heads=main.num_kv_heads,
        head_dim=main.k_dim,
        kv_lora_rank=hf.kv_lora_rank if main.is_mla else None,
        rope_dim=hf.qk_rope_head_dim if main.is_mla else None,
        page_tokens=int(config.page_tokens),
        # -1 (auto): the model was made for the longest context, and the KV cache then allowed for less
        rope=rope_in_force(hf, -1 if model.original_max_model_len == -1 else model.max_model_len),
        quantization=quantization_while_loading(model.hf_config, model.quantization),
        engine_overrides=_overrides(vllm_config, geometry, config.model_id),
    )


def config_digest(vllm_config: VllmConfig) -> str:
    """Of what config.json says, where weights in memory have a name that does not come from the model's files."""
    config = without_volatile(plain_values(vllm_config.model_config.hf_config.to_dict()))
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode("ascii")).hexdigest()


def _overrides(vllm_config: VllmConfig, geometry: Geometry, model_id: str | None) -> str:
    """Settings of the engine that change KV bytes and are not in the model's files."""
    overrides: dict[str, Any] = {}
    model = vllm_config.model_config
    computed = str(model.dtype).removeprefix("torch.")
    if geometry.main.kv_dtype != computed:
        overrides["dtype"] = computed
    cache = vllm_config.cache_config
    if cache.cache_dtype != "auto" and (skipped := cache.kv_cache_dtype_skip_layers):  # the others compute with theirs
        overrides["kv_cache_dtype_skip_layers"] = sorted(set(skipped))
    if callable(model.hf_overrides):  # whose text is another one in each process
        overrides["hf_overrides"] = config_digest(vllm_config)
    elif model.hf_overrides:
        overrides["hf_overrides"] = plain_values(model.hf_overrides)
    if model.hf_config_path or model.config_format not in ("auto", "hf", "mistral"):  # not the file beside the weights
        overrides["config"] = config_digest(vllm_config)
    told = {name: getattr(model, name, None) for name in ("quantization_config", "model_class_overrides")}
    told["code_revision"] = model.code_revision if model.trust_remote_code else None
    told |= {name: getattr(envs, name, None) for name in _QUANTISE}
    overrides |= {name: plain_values(value) for name, value in told.items() if value and value != "NONE"}
    for name in ("audio_model_id", "text_model_id"):  # Ultravox has these weights from other repositories
        if not model_id and (repository := getattr(model.hf_config, name, None)):
            load = vllm_config.load_config
            overrides[name] = weights_digest(repository, None, load.load_format, load.download_dir)
    if media := _media_settings(vllm_config):
        overrides["media"] = media
    if envs.VLLM_BATCH_INVARIANT:
        parallel = vllm_config.parallel_config  # its bits depend on the kernels, and on how many ranks are summed over
        experts = parallel.enable_expert_parallel and parallel.data_parallel_size * parallel.tensor_parallel_size
        attention = vllm_config.attention_config
        kinds = {kind: backend.name for kind, backend in attention.backend_per_kind.items()}
        kernels = [one and one.name for one in (attention.backend, attention.mla_prefill_backend)]
        overrides["batch_invariant"] = [kernels, kinds, parallel.tensor_parallel_size, experts]
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.uses_draft_kv_cache():  # its layers are part of the page
        draft = speculative.draft_model_config or model
        load = get_draft_load_config(vllm_config)
        named = model_id if is_from_elsewhere(load.load_format) else None
        overrides["draft"] = [str(speculative.method), named or _weights_digest(draft, load)]
    return canonical_json(overrides) if overrides else ""


def _weights_digest(model: ModelConfig, load: LoadConfig) -> str:
    return weights_digest(model.model, model.revision, load.load_format, load.download_dir)


def _media_settings(vllm_config: VllmConfig) -> dict[str, Any]:
    """What makes other embeddings of the same image, video or sound, and is in none of vLLM's hashes of these."""
    multimodal = vllm_config.model_config.multimodal_config
    if multimodal is None:
        return {}
    names = ["mm_processor_kwargs", "media_io_kwargs", "mm_encoder_attn_dtype"]
    if multimodal.is_multimodal_pruning_enabled():
        names += ["video_pruning_rate", "video_pruning_method"]
    settings = {name: plain_values(value) for name in names if (value := getattr(multimodal, name))}
    if scales := multimodal.mm_encoder_fp8_scale_path:
        settings["encoder_scales"] = files_digest(Path(scales).parent, (Path(scales).name,))
    if loader := os.environ.get("VLLM_VIDEO_LOADER_BACKEND"):
        settings["video_loader"] = loader
    return settings
