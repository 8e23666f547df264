"""The SGLang adapter: the pool as the third level of SGLang's hierarchical cache.

SGLang finds it through the entry point group `sglang.srt.plugins`, or by `--hicache-storage-backend dynamic` with the
names below. This module stays free of SGLang and torch until SGLang calls it.
"""

from collections.abc import Mapping
from typing import Any

from mooncake_connector.log import get_logger

KNOWN_VERSION = "0.5.23"
"""Of SGLang, with which this package is tested."""
BACKEND = "mooncake_connector"
"""The name in `--hicache-storage-backend`."""
BACKEND_MODULE = "sglang_backend.hicache"
BACKEND_CLASS = "MooncakeConnectorStorage"
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


def register() -> None:
    """Make the backend known to SGLang; safe to call any number of times in a process. Never raises.

    SGLang would log an exception and go on as well, but without saying what it means for the person who reads it.
    """
    try:
        from sglang_backend import plugin

        plugin.install()
    except Exception:
        get_logger(__name__).exception(
            "the backend %r is not offered to SGLang: this SGLang cannot be hooked; see `mooncake-connector doctor "
            "sglang`",
            BACKEND,
        )


def own_settings(extra: Mapping[str, Any]) -> dict[str, Any]:
    """All but SGLang's own keys; one that nobody knows is left in, for the error that names it."""
    return {key: value for key, value in extra.items() if key not in _SGLANG_KEYS}
