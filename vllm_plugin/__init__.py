"""The vLLM adapter: `MooncakeKVConnector`, one connector for prefix reuse from the pool.

vLLM finds it through the entry point group `vllm.general_plugins`, or by
`"kv_connector_module_path": "vllm_plugin.connector"`. This module stays free of vLLM and torch until vLLM calls it.
"""

CONNECTOR = "MooncakeKVConnector"
"""The name in `--kv-transfer-config` and of the class: vLLM's MultiConnector looks a class up by its own name."""
MODULE = "vllm_plugin.connector"
"""What may be written as `kv_connector_module_path`."""


def register() -> None:
    """Make the connector known to vLLM; safe to call any number of times in a process.

    vLLM's registry raises on a second registration, and plugins are loaded in every process, some of them twice.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_plugin import conclusions, early, stages

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    early.watch(CONNECTOR, MODULE)
    conclusions.watch(CONNECTOR)
    stages.watch()
