"""From settings to a tier. Each kind is imported only where it is configured, since some need packages of their own."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from mooncake_connector.config.tiers import TierSettings
from store_client.tiers.base import Tier, TierError


class _Kind(NamedTuple):
    module: str
    tier: str
    extra: str | None = None
    """Of this distribution, where the kind needs one."""


_KINDS = {
    "mooncake": _Kind("store_client.tiers.mooncake", "MooncakeCluster", "mooncake"),
    "disk": _Kind("store_client.tiers.disk", "Disk"),
    "folder": _Kind("store_client.tiers.folder", "SharedFolder"),
    "object": _Kind("store_client.tiers.object", "ObjectStore", "object"),
}


def open_tier(settings: TierSettings, secret: bytes, pool_name: str = "") -> Tier:
    """The tier that `settings` describe, ready for use: `Class(settings, pool_name)` of its kind.

    Args:
        secret: what seals are keyed with; empty where there is no `secret_file`.
        pool_name: tells the pools of a host apart, for tiers that must.

    Raises TierError: `lasting` where a package, the secret or a right is missing, so that a person has to act.
    """
    kind = _KINDS[settings.kind]
    try:
        tier_class: Any = getattr(import_module(kind.module), kind.tier)
    except ImportError as error:
        raise TierError(
            f"tier {settings.title} ({settings.kind}) needs a package that is not there ({error}): "
            f"pip install '{_requirement(kind)}'",
            "unavailable", lasting=True,
        ) from None  # fmt: skip
    if tier_class.needs_mac and not secret:
        raise TierError(
            f"tier {settings.title} ({settings.kind}) can be written to by others than this deployment, so its pages "
            "need a MAC: set `secret_file`, the same secret on all hosts",
            "denied", lasting=True,
        )  # fmt: skip
    tier: Tier = tier_class(settings, pool_name)
    return tier


def _requirement(kind: _Kind) -> str:
    return f"mooncake-connector[{kind.extra}]" if kind.extra else "mooncake-connector"
