"""Who a model is: a digest of its configuration and of the content of its weight files.

Neither the path nor the served name enters, so a copied or renamed checkpoint keeps its pages, and another checkpoint
put under the same path never sees them. How files are read and remembered is `fingerprint`'s work.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.identity.fingerprint import fingerprint_files
from mooncake_connector.kv.namespace import canonical_json

# They change from one save or one library version to the next without changing any KV byte: where the files lay, which
# library wrote them, and the compute dtype, which the namespace states as the KV dtype that is really in force.
VOLATILE_CONFIG_FIELDS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# The first pattern that matches anything is what engines load.
WEIGHT_PATTERNS: tuple[tuple[str, ...], ...] = (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",))
_NOT_WEIGHTS = ("training_args*", "optimizer*", "scheduler*", "scaler*", "rng_state*")
# Files beside config.json that change what the weights mean: quantisation settings, the model's own code, how images,
# videos and sound are made smaller and divided before it sees them, and what vLLM reads of Mistral's in its place.
_MEANING_PATTERNS = ("*quant*config*.json", "*.py", "*processor_config.json", "params.json")
_CONFIG_NAMES = ("config.json", "params.json")
LORA_FILES = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")
"""What makes up a LoRA adapter, for `files_digest`."""


def model_digest(
    path: Path,
    *,
    config: Path | None = None,
    patterns: Sequence[Sequence[str]] = WEIGHT_PATTERNS,
    cache_dir: Path | None = None,
) -> str:
    """64 hex digits that two folders share if they hold the same model.

    `path` is a checkpoint folder, or a single GGUF file; `config` is where its configuration is, if elsewhere. With a
    `cache_dir`, files that did not change since an earlier call are not read again.

    Raises ModelIdentityError that names the path where configuration or weights are missing or cannot be read.
    """
    path = Path(path)
    try:
        if path.is_file():
            weights, meaning, said = [path], [], None
        else:
            config = config or path
            weights, said = _weight_files(path, patterns), _read_config(config)
            meaning = _matching(config, _MEANING_PATTERNS)
    except OSError as error:
        raise ModelIdentityError(f"model path {path} cannot be read: {error.strerror}") from None
    identity: dict[str, Any] = {
        "config": said,
        "weights": sorted(fingerprint_files(weights, cache_dir).values()),
        "meaning": sorted(fingerprint_files(meaning, None).values()),
        "overrides": {},  # none, since what an engine is told is not of the files; but part of the digest
    }
    # config.json may hold Infinity (ALiBi and clipping limits do), which canonical_json forbids elsewhere.
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"mooncake-connector-model-v1" + text.encode("ascii")).hexdigest()


def files_digest(path: Path, patterns: Sequence[str], *, cache_dir: Path | None = None) -> str:
    """64 hex digits over names and contents of the files in folder `path` that match a glob of `patterns`.

    Of a glob with `**` a name is that within `path`.

    Raises ModelIdentityError where nothing matches.
    """
    path = Path(path)
    try:
        files = _matching(path, patterns)
    except OSError as error:
        raise ModelIdentityError(f"{path} cannot be read: {error.strerror}") from None
    if not files:
        raise ModelIdentityError(f"{path} has no file that matches {', '.join(patterns)}: its identity is unknown")
    fingerprints = fingerprint_files(files, cache_dir)
    named = {file.relative_to(path).as_posix(): fingerprint for file, fingerprint in fingerprints.items()}
    return hashlib.sha256(b"mooncake-connector-files-v1" + canonical_json(named).encode("ascii")).hexdigest()


def model_stamp(
    path: Path, patterns: Sequence[Sequence[str]] = WEIGHT_PATTERNS
) -> dict[str, tuple[str, int, int]]:
    """Place, size and time of change of each file that `model_digest` reads, by name: cheap, another after a change.

    Raises ModelIdentityError and OSError.
    """
    if path.is_file():
        return _stamps(path, [path])
    return _stamps(path, [*_weight_files(path, patterns), *_matching(path, (*_MEANING_PATTERNS, *_CONFIG_NAMES))])


def files_stamp(path: Path, patterns: Sequence[str]) -> dict[str, tuple[str, int, int]]:
    """As `model_stamp`, of what `files_digest` reads."""
    return _stamps(path, _matching(path, patterns))


def _stamps(path: Path, files: Sequence[Path]) -> dict[str, tuple[str, int, int]]:
    # Not inode and ctime: those change as well where nothing is written, on mounted object stores, by links and chmod.
    # The place behind links: of a folder a link leads to, or of a blob of the hub's, that revisions share.
    return {
        file.relative_to(path).as_posix(): (os.path.realpath(file), status.st_size, status.st_mtime_ns)
        for file in files
        for status in (file.stat(),)
    }


def _weight_files(path: Path, patterns: Sequence[Sequence[str]] = WEIGHT_PATTERNS) -> list[Path]:
    for kind in patterns:
        found = [file for file in _matching(path, kind) if not any(file.match(pattern) for pattern in _NOT_WEIGHTS)]
        if found:
            return found
    state = "has no weight files (*.safetensors, *.bin, *.pt, *.gguf)" if path.is_dir() else "is not a folder"
    raise ModelIdentityError(
        f"model path {path} {state}, so the model cannot be told from others: set `model_id` to a name that changes "
        "whenever the weights do"
    )


def _matching(path: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})


def _read_config(path: Path) -> Any:
    """The model's configuration without volatile fields, or None where a GGUF file carries it."""
    for name in _CONFIG_NAMES:
        file = path / name
        if not file.exists():
            continue
        try:
            return without_volatile(json.loads(file.read_bytes()))
        except (OSError, ValueError) as error:
            raise ModelIdentityError(f"{file} cannot be read as JSON: {error}") from None
    if any(path.glob("*.gguf")):
        return None
    raise ModelIdentityError(f"model path {path} has no config.json: set `model_id` to name the model instead")


def without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_volatile(item) for key, item in value.items() if key not in VOLATILE_CONFIG_FIELDS}
    if isinstance(value, list):
        return [without_volatile(item) for item in value]
    return value
