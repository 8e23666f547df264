"""What vLLM concludes from other settings about this connector, or from this connector about other settings.

Two of `VllmConfig`'s methods are wrapped where the plugin is registered, before any configuration is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from mooncake_connector.contain import contained, nothing
from mooncake_connector.log import get_logger, log_once
from vllm_plugin.early import parts
from vllm_plugin.wrapping import wrap

_FIELDS = ("kv_connector", "kv_connector_extra_config")

T = TypeVar("T")

logger = get_logger(__name__)


def watch(name: str) -> None:
    """Look at what vLLM makes of a configuration with connector `name`; safe to call again."""
    from vllm.config import VllmConfig

    def offloading(config: Any, before: list[str]) -> None:
        """`--kv-offloading-size` puts vLLM's connector in place of the configured one, and says nothing."""
        if name in before and name not in (after := _names(config)):
            said = "--kv-offloading-size puts vLLM's %s in place of %s: the pool is not used. "
            said += "Leave it out, or name both connectors in a MultiConnector"
            logger.warning(said, ", ".join(after), name)

    def embeddings(config: Any, allowed: bool) -> None:
        """vLLM lets clients of whoever may be a KV consumer, as "kv_both" is, send embeddings of images in place of
        these, and even leave them out, as if all KV came from elsewhere. Here it may always have to be computed, and
        without them that ends the engine. And of media that are left out nobody knows what they are called."""
        media, encoder = _media(config), getattr(config, "ec_transfer_config", None)
        if media is None or name not in _names(config) or (encoder is not None and encoder.is_ec_consumer):
            return
        if (media.enable_mm_embeds, media.allow_missing_mm_embeddings) != (allowed, False):
            media.enable_mm_embeds, media.allow_missing_mm_embeddings = allowed, False
            said = "what %s does not bring is computed: clients may not leave embeddings of images out, and may send "
            said += "them where --enable-mm-embeds is given"
            log_once("embeddings", said, name, level=logging.INFO, logger=logger)

    _wrap(VllmConfig, "_post_init_kv_transfer_config", _names, offloading)
    _wrap(VllmConfig, "_resolve_mm_embedding_inputs", _allows_embeddings, embeddings)


def _media(config: Any) -> Any:
    return getattr(config.model_config, "multimodal_config", None)


def _allows_embeddings(config: Any) -> bool:
    media = _media(config)
    return media is not None and bool(media.enable_mm_embeds)


def _names(config: Any) -> list[str]:
    """Of the configured connector, and of those within it if it is a MultiConnector."""
    transfer = config.kv_transfer_config
    given = None if transfer is None else {field: getattr(transfer, field) for field in _FIELDS}
    return [str(part.get("kv_connector")) for part in parts(given)]


def _wrap(owner: type, method: str, look: Callable[[Any], T], after: Callable[[Any, T], None]) -> None:
    """Have `look` see the configuration before a method concludes, and `after` what it is then, and what `look` saw."""

    def call(concludes: Callable[..., Any], config: Any, *args: Any, **kwargs: Any) -> Any:
        seen: list[T] = []
        contained(nothing)(lambda: seen.append(look(config)))()
        answer = concludes(config, *args, **kwargs)
        if seen:
            contained(nothing)(after)(config, seen[0])
        return answer

    wrap(owner, method, call)
