"""Whose pages these are: the namespace of this vLLM instance.

Everything that changes KV bytes enters it, or the chain root of a request (`naming.py`). Nothing here touches the pool.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_connector.config import Config
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.fingerprint import default_cache_dir
from mooncake_connector.model_identity import model_digest
from mooncake_connector.namespace import Namespace, canonical_json
from vllm_plugin.geometry import Geometry

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def instance_namespace(vllm_config: VllmConfig, geometry: Geometry, config: Config) -> Namespace:
    """The namespace of an instance. Reads all weight files the first time it meets them: seconds for a large model.

    Raises:
        ModelIdentityError: the model's files cannot be found; the text says to set `model_id`.
    """
    model = vllm_config.model_config
    hf = model.hf_text_config
    return Namespace(
        model_name=str(model.model),
        model_digest=config.model_id or _digest(model, vllm_config),
        kv_dtype=geometry.kv_dtype,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.k_dim,
        kv_lora_rank=hf.kv_lora_rank if geometry.is_mla else None,
        rope_dim=hf.qk_rope_head_dim if geometry.is_mla else None,
        page_tokens=int(config.page_tokens),
        rope=_rope(model),
        quantization=_quantization(model),
        engine_overrides=_overrides(vllm_config, geometry),
    )


def _digest(model: ModelConfig, vllm_config: VllmConfig) -> str:
    if vllm_config.load_config.load_format == "dummy":
        return f"dummy-{uuid.uuid4().hex}"  # weights made up at start: nobody else has them
    return model_digest(model_files(model.model, model.revision), cache_dir=default_cache_dir())


def model_files(name: str, revision: str | None) -> Path:
    """Folder (or GGUF file) of a model given as a path or as the name of a hub repository that is already cached."""
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        raise ModelIdentityError(
            f"the files of model {name!r} are neither a local path nor in the hub's cache ({error}), so the model "
            "cannot be told from others: set `model_id` to a name that changes whenever the weights do"
        ) from None


def _rope(model: ModelConfig) -> str:
    """What config.json does not say about rope: vLLM picks the factors of some kinds by the longest context served."""
    hf = model.hf_text_config
    rope = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", ""))
    return canonical_json({"max_model_len": model.max_model_len}) if kind in ("longrope", "su", "dynamic") else ""


def _quantization(model: ModelConfig) -> str:
    """Quantisation that vLLM applies while loading; one that the checkpoint carries is in its own config.json."""
    if getattr(model.hf_config, "quantization_config", None) or getattr(model.hf_config, "compression_config", None):
        return ""
    return str(model.quantization or "")


def _overrides(vllm_config: VllmConfig, geometry: Geometry) -> str:
    """Settings of the engine that change KV bytes and are not in the model's files."""
    overrides: dict[str, Any] = {}
    model = vllm_config.model_config
    if geometry.kv_dtype.startswith("fp8"):  # otherwise the KV dtype says how the model computes
        overrides["dtype"] = str(model.dtype).removeprefix("torch.")
    if model.hf_overrides:
        overrides["hf_overrides"] = _plain(model.hf_overrides)
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:  # its layers are part of the page
        draft = speculative.draft_model_config
        overrides["draft"] = [str(speculative.method), model_digest(model_files(draft.model, draft.revision))]
    return canonical_json(overrides) if overrides else ""


def _plain(value: Any) -> Any:
    """JSON values only; anything else by its text, so that an unknown object still tells two settings apart."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
