"""What `mooncake-connector doctor vllm` looks at: vLLM as it would start in this environment, but not started."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mooncake_connector import checks, quick_start
from mooncake_connector.checks import Check, failed
from vllm_plugin import CONNECTOR, doctor_config
from vllm_plugin.doctor_config import own_settings as own_settings

KNOWN_VERSION = "0.32.0"
PARTLY_KNOWN = {"0.33.0": "of 0.33.0 its interface and its scheduler alone, no running engine"}
START = quick_start.VLLM

_LATER = ("unregister_kv_caches", "restore_kv_caches")
"""What vLLM has from 0.33 on."""
_GROUP = "vllm.general_plugins"
_WHITELIST = "VLLM_PLUGINS"


def run(transfer_config: str | None = None) -> Iterator[Check]:
    """The checks, in the order in which one follows from the other; importing vLLM takes some seconds.

    Args:
        transfer_config: what follows `--kv-transfer-config`.
    """
    try:
        import vllm
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.plugins import load_general_plugins
    except Exception as error:
        yield checks.not_imported("vLLM", "vllm", error)
        return
    yield checks.version("vLLM", vllm.__version__, KNOWN_VERSION, PARTLY_KNOWN)
    whitelist = os.environ.get(_WHITELIST)
    chosen = None if whitelist is None else whitelist.split(",")
    entry = checks.entry_point(_GROUP, "mooncake_connector", "vllm_plugin:register", chosen, _WHITELIST)
    yield entry
    if entry.status is checks.Status.FAILED:
        return
    try:
        load_general_plugins()
        connector = KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
    except Exception as error:
        yield failed("connector", f"vLLM's factory cannot load it: {type(error).__name__}: {error}")
        return
    yield checks.interface("connector", connector, beside=_LATER)
    if transfer_config is not None:
        yield from doctor_config.check(transfer_config)
