"""Finds a wrong setting of ours when vLLM reads its own configuration, before any weight is loaded.

vLLM makes the connector only after the model is loaded, in a process of its own, and asks its class nothing on the CPU
before that. So two of its functions are wrapped where the plugin is registered: the one that ends the making of a
`KVTransferConfig`, which for `vllm serve` is the reading of `--kv-transfer-config`, and the factory's look-up of the
class, which comes first where a `KVTransferConfig` was made before the plugin was loaded, as for `LLM`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mooncake_connector.config.sources import load_config
from mooncake_connector.errors import ConfigError
from transfer.transports.registry import check_configured
from vllm_plugin.wrapping import wrap

_FIELDS = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")


class SettingsError(ConfigError, argparse.ArgumentTypeError):
    """A `ConfigError` of which argparse shows the message alone."""


def watch(name: str, module: str) -> None:
    """Have vLLM look at the settings of connector `name` as soon as it knows them; safe to call again."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def check(transfer: Any) -> None:
        for part in parts({field: getattr(transfer, field) for field in _FIELDS}):
            if part.get("kv_connector") == name and part.get("kv_connector_module_path") in (None, module):
                check_extra(part.get("kv_connector_extra_config"))

    def checked(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        given = [one for one in (*args, *kwargs.values()) if hasattr(one, "kv_connector_extra_config")]
        if given:
            check(given[0])
        return answer

    wrap(KVTransferConfig, "__post_init__", checked)  # what a later vLLM lacks is found when the connector is made
    wrap(KVConnectorFactory, "get_connector_class", checked)


def parts(given: Any) -> Iterator[Mapping[str, Any]]:
    """The configuration of one connector, and of those within it if it is a MultiConnector."""
    if not isinstance(given, Mapping):
        return
    yield given
    extra = given.get("kv_connector_extra_config")
    if given.get("kv_connector") == "MultiConnector" and isinstance(extra, Mapping):
        children = extra.get("connectors")
        for child in children if isinstance(children, list) else ():
            yield from parts(child)


def check_extra(extra: Any) -> None:
    """Raises SettingsError for a `kv_connector_extra_config`, or an environment or file beside it, that is wrong."""
    try:
        config = load_config(extra)
        check_configured(config.transports, config.transfer_hosts)
    except ConfigError as error:
        raise SettingsError(
            f"mooncake-connector: {error}. `mooncake-connector doctor vllm --kv-transfer-config JSON` checks the whole "
            "of it without starting vLLM"
        ) from None
