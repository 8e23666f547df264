"""What vLLM concludes from other settings about this connector, or from this connector about other settings.

Two of `VllmConfig`'s methods are wrapped where the plugin is registered, before any configuration is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mooncake_connector.log import get_logger
from vllm_plugin.early import parts

_MARK = "_mooncake_connector_concludes"
_FIELDS = ("kv_connector", "kv_connector_extra_config")

logger = get_logger(__name__)


def watch(name: str) -> None:
    """Look at what vLLM makes of a configuration with connector `name`; safe to call again."""
    from vllm.config import VllmConfig

    def offloading(config: Any, conclude: Callable[[], None]) -> None:
        """`--kv-offloading-size` puts vLLM's connector in place of the configured one, and says nothing."""
        before = _names(config)
        conclude()
        if name in before and name not in (after := _names(config)):
            said = "--kv-offloading-size puts vLLM's %s in place of %s: the pool is not used. "
            said += "Leave it out, or name both connectors in a MultiConnector"
            logger.warning(said, ", ".join(after), name)

    def embeddings(config: Any, conclude: Callable[[], None]) -> None:
        """vLLM lets clients of whoever may be a KV consumer, as "kv_both" is, send embeddings of images in place of
        these, and even leave them out, as if all KV came from elsewhere. Here it may always have to be computed, and
        without them that ends the engine. And of media that are left out nobody knows what they are called."""
        media = getattr(config.model_config, "multimodal_config", None)
        allowed = media is not None and media.enable_mm_embeds
        conclude()
        encoder = getattr(config, "ec_transfer_config", None)
        is_ours = config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector == name
        if media is not None and is_ours and not (encoder is not None and encoder.is_ec_consumer):
            media.enable_mm_embeds, media.allow_missing_mm_embeddings = allowed, False

    _wrap(VllmConfig, "_post_init_kv_transfer_config", offloading)
    _wrap(VllmConfig, "_resolve_mm_embedding_inputs", embeddings)


def _names(config: Any) -> list[str]:
    """Of the configured connector, and of those within it if it is a MultiConnector."""
    transfer = config.kv_transfer_config
    given = None if transfer is None else {field: getattr(transfer, field) for field in _FIELDS}
    return [str(part.get("kv_connector")) for part in parts(given)]


def _wrap(owner: type, method: str, around: Callable[[Any, Callable[[], None]], None]) -> None:
    wrapped = getattr(owner, method, None)
    if wrapped is None or getattr(wrapped, _MARK, False):  # a vLLM without it does not conclude this
        return

    @wraps(wrapped)
    def call(self: Any) -> None:
        around(self, lambda: wrapped(self))

    setattr(call, _MARK, True)
    setattr(owner, method, call)
