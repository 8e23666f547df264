"""Mooncake's own package: it is loaded here, and only where a tier of this kind is configured."""

from __future__ import annotations

from importlib import import_module, metadata
from types import ModuleType
from typing import Any

from mooncake_connector.config.tiers import MooncakeTier
from store_client.tiers.base import TierError


def replication(library: ModuleType, settings: MooncakeTier) -> Any:
    """How a page is to be kept, in the library's terms."""
    config = library.ReplicateConfig()
    config.replica_num = settings.replicas
    if settings.soft_pin:
        config.soft_pin_action = library.SoftPinAction.ENABLE
    return config


def load(title: str) -> ModuleType:
    """The module mooncake.store. Raises TierError, lasting, where it is missing or cannot be loaded."""
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        if "shared object" in str(error):
            needed = "a system library is missing: apt-get install libibverbs1 libnuma1 librdmacm1 liburing2 libcurl4"
        else:
            needed = "pip install 'mooncake-connector[mooncake]', or the wheel of Mooncake that fits this machine"
        text = f"tier {title} (mooncake): the client of Mooncake cannot be loaded ({error}): {needed}"
        raise TierError(text, "unavailable", lasting=True) from None


def version() -> str:
    """Of the client that is installed, for people."""
    found = [one for one in metadata.distributions() if one.name.lower().startswith("mooncake-transfer-engine")]
    return f"{found[0].name} {found[0].version}" if found else "of an unknown version"
