"""Which keys of SGLang's `--hicache-storage-backend-extra-config` are ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""Keys of `--hicache-storage-backend-extra-config` that SGLang reads itself; not every caller of ours removes them."""


def own_settings(extra: Mapping[str, Any]) -> dict[str, Any]:
    """All but SGLang's own keys; one that nobody knows is left in, for the error that names it."""
    return {key: value for key, value in extra.items() if key not in _SGLANG_KEYS}
