"""The SGLang adapter: the pool as the third level of SGLang's hierarchical cache.

SGLang finds it through the entry point group `sglang.srt.plugins`, or by `--hicache-storage-backend dynamic` with the
names below. This module stays free of SGLang and torch until SGLang calls it.
"""

from mooncake_connector.log import get_logger

BACKEND = "mooncake_connector"
"""The name in `--hicache-storage-backend`."""
BACKEND_MODULE = "sglang_backend.hicache"
BACKEND_CLASS = "MooncakeConnectorStorage"


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
