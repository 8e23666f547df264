"""Whose pages these are: the namespace and the shard of one SGLang rank.

SGLang's page hashes carry tokens, extra key and salt; everything else that changes KV bytes is said here, from the host
pool and the server's arguments and never from the served name. Fields are spelled as vLLM's side spells them wherever
both engines mean the same bytes; whatever has no such meaning makes the namespace SGLang's own (`engine_overrides`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_server_args

from mooncake_connector.config.schema import Config
from mooncake_connector.errors import ModelIdentityError
from mooncake_connector.kv.geometry import Shard
from mooncake_connector.kv.identity.checkpoint import (
    checkpoint_path,
    plain_values,
    quantization_while_loading,
    rope_in_force,
    weight_patterns,
    weights_digest,
)
from mooncake_connector.kv.identity.fingerprint import default_cache_dir
from mooncake_connector.kv.identity.model import LORA_FILES, files_digest, files_stamp, model_stamp
from mooncake_connector.kv.namespace import Namespace, canonical_json
from mooncake_connector.kv.page import PageFormat
from sglang_backend.host_pages import TOKEN_ROWS, device_rows
from sglang_backend.weights import in_memory

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OTHER_WEIGHTS = ("modelopt_quant", "modelopt_checkpoint_restore_path", "quantize_and_serve", "forward_hooks")
"""Settings by which a model computes with other weights than its files have, or with functions of the user's in it."""
_EXPERTS = ("**/*.safetensors", "**/*.gguf", "**/*.kt")
"""What KTransformers reads of a folder of experts; the last in a folder for each layer."""
WHOLE = Shard(0, 1, 0, 1)
"""Shard of pages that are not divided into layers and heads."""


class LoadedFiles:
    """What the files of this process's models and adapters were as they were loaded. A checkpoint may be overwritten
    later, or the link to it be turned, and a backend be attached after that: its pages are not of the new files."""

    def __init__(self) -> None:
        self._stamps: dict[str, Any] = {}

    def note(self, *, is_draft: bool) -> None:
        """What is on disk now of the model, or else of the draft model, was loaded."""
        if (args := _server_args()) is not None:
            self._keep(_of_draft(args) if is_draft else _of_model(args))

    def note_adapters(self) -> None:
        if (args := _server_args()) is not None:
            self._keep(_of_adapters(args))

    def _keep(self, stamps: dict[str, Any]) -> None:
        self._stamps = {**stamps, **self._stamps}  # of a draft in the model's own files, the model's

    def check(self, args: Any, model_id: str | None) -> None:
        """Raises ModelIdentityError where files that name something are not those that were loaded."""
        now = {**_of_adapters(args), **_of_draft(args), **_of_model(args)}
        named = {args.model_path} if model_id else set()
        changed = [name for name, stamp in self._stamps.items() if name not in named and now.get(name) != stamp]
        if changed:
            raise ModelIdentityError(
                f"the files of {', '.join(changed)} are not those any more that this server loaded, and nothing says "
                "what it has in memory: start it again"
            )


loaded_files = LoadedFiles()


# Stamps by name; without what cannot be found.


def _of_model(args: Any) -> dict[str, Any]:
    folder, patterns = partial(_folder, args, args.model_path, args.revision), weight_patterns(args.load_format)
    found = _stamp(args.model_path, lambda: model_stamp(folder(), patterns))
    if args.quantization_param_path:
        found |= _stamp(args.quantization_param_path, lambda: files_stamp(*_scales(args)))
    if args.kt_weight_path:  # they may be in the model's own folder
        found |= _stamp(f"{args.kt_weight_path} (experts)", lambda: files_stamp(*_experts(args)))
    return found


def _of_draft(args: Any) -> dict[str, Any]:
    name, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
    return _stamp(name, lambda: model_stamp(_folder(args, name, revision))) if name else {}


def _of_adapters(args: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for adapter in args.lora_paths or []:
        with suppress(AttributeError):
            found |= _of_adapter(adapter.lora_path)
    return found


def _of_adapter(path: str) -> dict[str, Any]:
    return _stamp(path, lambda: files_stamp(checkpoint_path(path, None), LORA_FILES))


def _stamp(name: str, stamp: Callable[[], Any]) -> dict[str, Any]:
    with suppress(ModelIdentityError, OSError):
        return {name: stamp()}
    return {}


# Folder and names of files that a model is loaded with.


def _folder(args: Any, name: str, revision: str | None) -> Path:
    return checkpoint_path(name, revision, args.download_dir)


def _scales(args: Any) -> tuple[Path, tuple[str, ...]]:
    path = Path(args.quantization_param_path)
    return path.parent, (path.name,)


def _experts(args: Any) -> tuple[Path, tuple[str, ...]]:
    return Path(args.kt_weight_path), _EXPERTS


@dataclass(frozen=True)
class Identity:
    """What one rank stores its pages under.

    Args:
        namespace: makes the namespace; may read all weight files, so it is called in the background.
        shard: of the model's own KV pool; None where that pool is opaque.
        own: why pages are not shared with vLLM; empty where they are. Part of the namespace.
        on_one_host: whether the other ranks of the instance use the same pool.
    """

    namespace: Callable[[], Namespace]
    shard: Shard | None
    own: dict[str, Any] = field(default_factory=dict)
    on_one_host: bool = False


def identify(config: Config, storage: HiCacheStorageConfig, pool: HostKVCache, fmt: PageFormat | None) -> Identity:
    """Identity of a rank whose KV host pool is `pool`; `fmt` is None where its pages are opaque.

    Raises ModelIdentityError without a running server (a controller that is driven directly) and no `model_id`.
    """
    args = _server_args()
    if args is None:
        return _without_server(config, storage, pool, fmt)
    model = ModelConfig.from_server_args(get_server_args())
    shard = _shard(storage, pool, fmt, model)
    own = _own_settings(args, storage, pool)
    if shard is None:
        own["pool"] = opaque_pool("kv", storage, pool, replicated=storage.is_mla_model)
    return Identity(lambda: _namespace(config, args, model, pool, fmt, own), shard, own, args.nnodes == 1)


def opaque_pool(name: str, storage: HiCacheStorageConfig, pool: HostKVCache, *, replicated: bool) -> dict[str, Any]:
    """What tells the pages of a pool of unknown inside from those of every other; plain JSON values."""
    rows = device_rows(pool)
    state_dtype = getattr(pool, "temporal_dtype", None)  # of Mamba's states; `dtype` is that of the convolutions' alone
    return {
        **({} if rows == TOKEN_ROWS else {"rows": rows}),
        **({} if state_dtype is None else {"state_dtype": str(state_dtype)}),
        "name": str(name),
        "class": type(pool).__name__,
        "layout": str(getattr(pool, "layout", "")),
        "dtype": str(getattr(pool, "dtype", "")),
        "slots": int(getattr(pool, "page_size", 1) or 1),
        "tp": [0, 1] if replicated else [storage.tp_rank, storage.tp_size],
        "pp": [storage.pp_rank, storage.pp_size],
    }


def of_opaque_pool(namespace: Namespace, description: dict[str, Any]) -> Namespace:
    """The namespace of another pool of the instance that `namespace` belongs to."""
    overrides = json.loads(namespace.engine_overrides or "{}")
    return replace(namespace, engine_overrides=canonical_json({**overrides, "engine": "sglang", "pool": description}))


def _server_args() -> Any | None:
    try:
        args = get_server_args()
    except Exception:  # nothing was published in this process
        return None
    return None if args is None else resolving_view(args)


def _without_server(
    config: Config, storage: HiCacheStorageConfig, pool: HostKVCache, fmt: PageFormat | None
) -> Identity:
    if config.model_id is None:
        raise ModelIdentityError(
            "SGLang's arguments are not known in this process, so the model cannot be told from others: set `model_id` "
            "in --hicache-storage-backend-extra-config to a name that changes whenever the weights do"
        )
    heads = fmt.num_heads if fmt is not None else 1
    ranks = 1 if storage.is_mla_model else storage.tp_size
    own: dict[str, Any] = {}
    shard = None
    if fmt is None or storage.pp_size > 1:
        own["pool"] = opaque_pool("kv", storage, pool, replicated=storage.is_mla_model)
    else:
        first = 0 if storage.is_mla_model else storage.tp_rank * heads
        shard = Shard(0, fmt.num_layers, first, first + heads)
    namespace = Namespace(
        model_name=str(storage.model_name or config.model_id),
        model_digest=config.model_id,
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        num_layers=fmt.num_layers if fmt is not None else 1,
        num_kv_heads=heads * ranks,
        head_dim=fmt.k_dim if fmt is not None else 1,
        page_tokens=_page_tokens(pool),
        engine_overrides=_overrides({}, own),
    )
    return Identity(lambda: namespace, shard, own)


def _shard(
    storage: HiCacheStorageConfig, pool: HostKVCache, fmt: PageFormat | None, model: ModelConfig
) -> Shard | None:
    """The rank's layers and heads, or None where the pool does not hold all of them in full."""
    if fmt is None or storage.attn_cp_size > 1 or storage.dcp_size > 1:
        return None
    num_layers = model.num_hidden_layers
    first_layer = pool.start_layer or 0
    layers = (first_layer, first_layer + fmt.num_layers)
    in_full = layers == (0, num_layers) if storage.pp_size == 1 else layers[1] <= num_layers
    if not in_full or model.num_attention_layers != num_layers:  # sliding windows, Mamba layers, shared layers
        return None
    if storage.is_mla_model:
        return Shard(*layers, 0, 1)
    heads, ranks = model.get_total_num_kv_heads(), storage.tp_size
    if fmt.num_heads != max(1, heads // ranks) or (heads % ranks and ranks % heads):
        return None
    first = storage.tp_rank * heads // ranks  # more ranks than heads: consecutive ranks hold the same head
    return Shard(*layers, first, first + fmt.num_heads)


def _own_settings(args: Any, storage: HiCacheStorageConfig, pool: HostKVCache) -> dict[str, Any]:
    """Settings whose pages only another SGLang with the same ones may read."""
    own: dict[str, Any] = {}
    if args.speculative_algorithm is not None:  # EAGLE names pages by pairs of tokens; draft layers depend on the draft
        own["speculative"] = [str(args.speculative_algorithm), str(args.speculative_draft_model_path)]
    if pool.dtype not in _PLAIN_DTYPES:  # engines scale and pack them differently
        own["kv_cache"] = [str(args.kv_cache_dtype), str(args.dtype), str(args.quantization_param_path)]
    if storage.attn_cp_size > 1:
        own["attn_cp"] = [storage.attn_cp_rank, storage.attn_cp_size]
    if storage.dcp_size > 1:
        own["dcp"] = [storage.dcp_rank, storage.dcp_size]
    if args.enable_deterministic_inference:  # its bits depend on the kernels, and on how many ranks are summed over
        kernels = [args.attention_backend, args.prefill_attention_backend, args.decode_attention_backend]
        own["deterministic"] = [
            *map(str, kernels), str(args.rl_on_policy_target), args.tp_size, storage.tp_size, args.ep_size,
        ]  # fmt: skip
    for setting in _OTHER_WEIGHTS:
        if getattr(args, setting, None):
            own[setting] = str(getattr(args, setting))
    if args.kt_weight_path:  # experts in files of their own, quantised; deferred ones are added a layer later
        deferred = args.kt_max_deferred_experts_per_token
        own["ktransformers"] = [str(args.kt_method), str(args.kt_num_gpu_experts), str(deferred)]
    return own


def _namespace(
    config: Config, args: Any, model: ModelConfig, pool: HostKVCache, fmt: PageFormat | None, own: dict[str, Any]
) -> Namespace:
    text = model.hf_text_config
    is_mla = fmt is not None and fmt.v_dim == 0
    quantization = quantization_while_loading(model.hf_config, args.quantization)
    own = dict(own)
    if args.speculative_draft_model_path:
        draft, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
        own["draft"] = weights_digest(draft, revision, download_dir=args.download_dir)
    if args.quantization_param_path:
        own["kv_scales"] = files_digest(*_scales(args))
    if args.kt_weight_path:
        own["experts"] = files_digest(*_experts(args), cache_dir=default_cache_dir())
    source = "weight_cache" if getattr(args, "weight_cache_mode", None) == "client" else args.load_format
    digest = config.model_id or weights_digest(args.model_path, args.revision, source, args.download_dir)
    adapters = _adapters(args)
    if in_memory.are_of_files:
        loaded_files.check(args, config.model_id)  # behind the digests, which take a while
    return Namespace(
        model_name=str(args.model_path),
        model_digest=digest,
        kv_dtype=str(pool.dtype).removeprefix("torch."),
        num_layers=model.num_hidden_layers,
        num_kv_heads=1 if is_mla else model.get_total_num_kv_heads(),
        head_dim=fmt.k_dim if fmt is not None else model.head_dim,
        kv_lora_rank=text.kv_lora_rank if is_mla else None,
        rope_dim=text.qk_rope_head_dim if is_mla else None,
        page_tokens=_page_tokens(pool),
        rope=rope_in_force(text, model.context_len),
        quantization=f"sglang:{quantization}" if quantization else "",
        lora=adapters,
        engine_overrides=_overrides(json.loads(args.json_model_override_args or "{}"), own),
    )


def _overrides(hf_overrides: dict[str, Any], own: dict[str, Any]) -> str:
    overrides: dict[str, Any] = {"engine": "sglang", **own} if own else {}
    if hf_overrides:
        overrides["hf_overrides"] = plain_values(hf_overrides)
    return canonical_json(overrides) if overrides else ""


def _adapters(args: Any) -> str:
    """Digest of the adapters of `--lora-paths`: SGLang names those by name and path, whatever their files hold.

    Adapters that are loaded at run time get a random name from SGLang and need nothing.
    """
    adapters = {}
    for adapter in args.lora_paths or []:
        folder = checkpoint_path(adapter.lora_path, None)
        adapters[adapter.lora_id] = files_digest(folder, LORA_FILES, cache_dir=default_cache_dir())
    if adapters and args.lora_target_modules:  # of an adapter for all layers SGLang leaves out what is not among them
        adapters["target_modules"] = ",".join(sorted(args.lora_target_modules))
    return canonical_json(adapters) if adapters else ""


def _page_tokens(pool: HostKVCache) -> int:
    return int(getattr(pool, "logical_page_size", None) or pool.page_size)
