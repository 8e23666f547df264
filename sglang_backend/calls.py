"""What the arguments of SGLang's storage calls mean here: page hashes, the page before, host indices, the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mooncake_connector.contain import contained, nothing
from mooncake_connector.kv.keys import KEY_NBYTES
from mooncake_connector.log import get_logger, log_once
from sglang_backend import BACKEND_CLASS, BACKEND_MODULE

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

    from sglang_backend.stored_pool import StoredPool

logger = get_logger(__name__)


def page_keys(keys: Sequence[str]) -> list[bytes]:
    """SGLang's page hashes as page keys. Raises ValueError for one that is not 64 hex digits."""
    names = [bytes.fromhex(key) for key in keys]
    for key, name in zip(keys, names, strict=True):
        if len(name) != KEY_NBYTES:
            raise ValueError(f"SGLang's page hash {key!r} has {len(name)} bytes: expected {KEY_NBYTES}")
    return names


def parent_key(extra_info: HiCacheStorageExtraInfo | None) -> bytes | None:
    """The page before the first one of a call, where SGLang says it (`hicache_storage_pass_prefix_keys`)."""
    before = extra_info.prefix_keys if extra_info is not None else None
    return page_keys(before[-1:])[0] if before else None


def first_slots(stored: StoredPool | None, keys: Sequence[str], indices: torch.Tensor | None) -> list[int] | None:
    """The first slot of each page, or None where SGLang's indices do not fit the keys."""
    if stored is None or indices is None or indices.numel() != len(keys) * stored.pages.page_slots:
        if keys:
            log_once(
                "sglang.indices",
                "SGLang asked for %d pages with %s host indices: not moved",
                len(keys), None if indices is None else indices.numel(),
                logger=logger,
            )  # fmt: skip
        return None
    slots: list[int] = indices[:: stored.pages.page_slots].tolist()
    return slots


@contained(nothing)
def our_backend(controller: Any) -> Any:
    """The storage backend of a controller, if it is ours; else None. By whatever name it was made, and out of SGLang's
    failure injector."""
    backend = getattr(controller.storage_backend, "_backend", controller.storage_backend)
    made_of = [(base.__module__, base.__name__) for base in type(backend).__mro__]
    return backend if (BACKEND_MODULE, BACKEND_CLASS) in made_of else None
