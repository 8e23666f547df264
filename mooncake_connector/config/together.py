"""What must hold between the fields of a configuration, whichever places they come from."""

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_connector.config.tiers import place_of
from mooncake_connector.config.values import shown
from mooncake_connector.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one field, and where it comes from: "default", or the place that set it."""

    name: str
    value: Any
    source: str


def check_together(settings: list[Setting]) -> None:
    """See the module. Raises ConfigError."""
    found = {setting.name: setting for setting in settings}
    value = {setting.name: setting.value for setting in settings}

    def said(name: str) -> str:
        source = found[name].source
        if source == "default":
            return f"{name} by default"
        return source if source.startswith("environment variable") else f"{name} in {source}"

    def seen(name: str) -> str:
        text = (
            "null" if value[name] is None else repr(str(value[name]) if isinstance(value[name], Path) else value[name])
        )
        return f"{said(name)} is {text}"

    if value["granularity_chunk_tokens"] > value["granularity_layer_tokens"]:
        raise ConfigError(
            f"{seen('granularity_chunk_tokens')} and {seen('granularity_layer_tokens')}: expected the first to be at "
            "most the second"
        )
    tls = ("tls_certificate", "tls_key", "tls_authority")
    if len({value[name] is None for name in tls}) > 1:
        raise ConfigError(f"{', '.join(map(seen, tls))}: expected all three for TLS, or none")
    needing = [tier.title for tier in value["tiers"] if tier.needs_secret]
    if needing and value["secret_file"] is None:
        raise ConfigError(
            f"{said('tiers')} has {', '.join(needing)}, and {seen('secret_file')}: set secret_file to a file with the "
            "same secret on all hosts, since others may write there and pages are signed with it"
        )
    pool = os.path.realpath(value["pool"]) if value["pool"] is not None else None
    for tier in value["tiers"]:
        place = place_of(tier)
        if pool is not None and place is not None and Path(place).is_relative_to(pool):
            raise ConfigError(
                f"{said('tiers')} has {tier.title} with path {shown(place)}, and {seen('pool')}: expected a path "
                "outside the pool's folder"
            )
    if (
        value["agent_http_port"]
        and value["agent_http_token_file"] is None
        and not ipaddress.ip_address(value["agent_http_host"]).is_loopback
    ):
        raise ConfigError(
            f"{seen('agent_http_host')}, and {seen('agent_http_token_file')}: set agent_http_token_file to a file with "
            "a token, or agent_http_host to 127.0.0.1, which other hosts do not reach"
        )
    hosts = value["transfer_hosts"]
    if hosts and value["secret_file"] is None:
        raise ConfigError(
            f"{said('transfer_hosts')} has {', '.join(hosts)}, and {seen('secret_file')}: set secret_file to a file "
            "with the same secret for all instances, or leave transfer_hosts unset where all of them run on this host"
        )
