"""A Hugging Face checkpoint as both engines load it: where its files are, and what its files do not say.

Two engines give a model one namespace only if both leave out what config.json already fixes and spell the rest alike.
Configurations are transformers' objects, read by attribute, so that no engine and no transformers is imported here.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.fingerprint import default_cache_dir
from mooncake_connector.kv.identity.model import WEIGHT_PATTERNS, model_digest
from mooncake_connector.kv.namespace import canonical_json

_OF_FILES = (
    "auto", "bitsandbytes", "fastsafetensors", "flash_rl", "gguf", "hf", "instanttensor", "layered", "mistral", "pt",
    "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
)  # fmt: skip
"""Load formats of both engines that read the model's own files. Of a plugin's nobody knows what it reads."""
_ELSEWHERE = {
    "remote_instance": "another process's memory",  # SGLang's
    "weight_cache": "another process's memory",  # SGLang's daemon
    "ipc_cache": "another process's memory",  # vLLM's, which compares the headers of the files, not their content
    "modelexpress": "another process's memory",
    "npcache": "copies of its files that an earlier start made",
    "tensorizer": "the place that the loader's own settings name",
}


def is_from_elsewhere(load_format: str) -> bool:
    """Whether what is loaded so has no name by the model's files."""
    return load_format not in _OF_FILES


def checkpoint_path(name: str, revision: str | None, download_dir: str | None = None) -> Path:
    """Folder (or GGUF file) of a model given as a path or as the name of a hub repository that is already cached, in
    the hub's own cache or in `download_dir`.

    An engine downloads what it reads of a repository and no more, which newer hub libraries call incomplete.

    Raises ModelIdentityError where it is neither; the text says to set `model_id`.
    """
    path = Path(name)
    if path.exists():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:
        if (partial := getattr(error, "snapshot_path", None)) is not None:  # all that the engine wanted of it is there
            return Path(partial)
        raise ModelIdentityError(
            f"the files of model {name!r} are neither a local path nor in the hub's cache ({error}), so the model "
            "cannot be told from others: set `model_id` to a name that changes whenever the weights do"
        ) from None


def weights_digest(
    name: str, revision: str | None, load_format: str = "auto", download_dir: str | None = None
) -> str:
    """Digest of what an engine loads; weights that it makes up at start ("dummy") nobody else has.

    A `download_dir` has the weights of a model that is named, while its configuration is in the hub's own cache.

    Raises ModelIdentityError as `checkpoint_path` and `model_digest` do, and for weights that do not come from these
    files: those of another process's memory may have been read from others, or been updated since.
    """
    if load_format == "dummy":
        return f"dummy-{uuid.uuid4().hex}"
    if is_from_elsewhere(load_format):
        source = _ELSEWHERE.get(load_format, "a loader that may have read other files")
        raise ModelIdentityError(
            f"the weights of {name!r} came from {source} (load format {load_format!r}), and no file of the model says "
            "what they are: set `model_id` to a name that changes whenever the weights do"
        )
    path = checkpoint_path(name, revision, download_dir)
    config = path if download_dir is None else checkpoint_path(name, revision)
    return model_digest(path, config=config, patterns=weight_patterns(load_format), cache_dir=default_cache_dir())


def weight_patterns(load_format: str) -> Sequence[Sequence[str]]:
    """Of the files that are loaded so, as `model_digest` takes them."""
    return (("*.pt",),) if load_format == "pt" else WEIGHT_PATTERNS


def rope_in_force(text_config: Any, max_model_len: int) -> str:
    """What config.json does not say about rope: some kinds pick their factors by the longest context served."""
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", ""))
    return canonical_json({"max_model_len": max_model_len}) if kind in ("longrope", "su", "dynamic") else ""


def quantization_while_loading(hf_config: Any, method: str | None) -> str:
    """Quantisation that the engine applies while loading; one that the checkpoint carries is in its own config.json."""
    if getattr(hf_config, "quantization_config", None) or getattr(hf_config, "compression_config", None):
        return ""
    return str(method or "")


def plain_values(value: Any) -> Any:
    """JSON values only; anything else by its text, so that an unknown object still tells two settings apart."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
