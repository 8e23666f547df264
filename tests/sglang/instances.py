"""Backends as SGLang attaches them: one rank each, with or without a running server's arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from models import checkpoint
from mooncake_connector.kv.geometry import Shard
from sglang_backend import BACKEND, BACKEND_CLASS, BACKEND_MODULE
from store_client.embedded import EmbeddedStore
from store_client.testing import get_pages

DYNAMIC = {"backend_name": BACKEND, "module_path": BACKEND_MODULE, "class_name": BACKEND_CLASS, "interface_v1": 1}


def stored_pages(pool: Path, names: list[str], nbytes: int | None) -> list[tuple[Shard, list[bytes]]]:
    """What the pool holds: each shard, and the bytes of its pages of those names (none where `nbytes` is None)."""
    found = []
    with EmbeddedStore(pool) as store:
        for info in store.namespaces():
            pages = [bytearray(nbytes or 0) for _ in names]
            if nbytes is not None:
                space = store.space(info.namespace, info.shard)
                assert all(get_pages(space, [bytes.fromhex(name) for name in names], pages, nbytes=nbytes))
            found.append((info.shard, [bytes(page) for page in pages]))
    return found


def keys(count: int, name: str = "a") -> list[str]:
    """Page hashes as SGLang's: 64 hex digits."""
    return [hashlib.sha256(f"{name}{i}".encode()).hexdigest() for i in range(count)]


def storage_config(
    *,
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    dcp: tuple[int, int] = (0, 1),
    is_mla: bool = False,
    **extra: Any,
) -> HiCacheStorageConfig:
    """What a rank's controller says; `tp`, `pp` and `dcp` are (rank, size), `extra` is the extra config."""
    return HiCacheStorageConfig(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=True,
        is_page_first_layout=True,
        model_name="served",
        extra_config=extra,
        dcp_rank=dcp[0],
        dcp_size=dcp[1],
        logical_page_size=2 * 16 if dcp[1] > 1 else None,
    )


def open_storage(host_pool: Any, *, pool: Path, **options: Any) -> Any:
    """Create the backend through SGLang's factory and register `host_pool`; the pool is open when this returns.

    Args:
        options: of `storage_config`.
    """
    defaults = {"capacity": "64MiB", "model_id": "m", "is_mla": isinstance(host_pool, MLATokenToKVPoolHost)}
    config = storage_config(**{**DYNAMIC, **defaults, "pool": str(pool), **options})
    storage = StorageBackendFactory.create_backend("dynamic", config, host_pool)
    storage.register_mem_pool_host(host_pool)
    storage.on_host_pools_registered()
    return storage


def placed_hooks() -> list[Any]:
    """All that SGLang was given, those around one function each by itself."""
    given = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks]
    return [one for hook in given for one in getattr(hook, "hooks", [hook])]


@contextmanager
def server(name: str, **arguments: Any) -> Iterator[ServerArgs]:
    """The arguments of a server of the checkpoint `name`, published as SGLang's scheduler process does."""
    published = ServerArgs(
        model_path=str(checkpoint(name)),
        device="cpu",
        dtype="bfloat16",
        **{"page_size": 64, "attention_backend": "torch_native", **arguments},
    )
    runtime_context.publish(published, role="scheduler")
    try:
        yield published
    finally:
        runtime_context.reset_context()
