"""Engines whose MultiConnector has another connector beside ours, which loads asynchronously and stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cases import Start
from harness import Engine
from settings import Setup, multi_connector, transfer_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_plugin.connector import MooncakeKVConnector


class Store(MooncakeKVConnector):
    """Stands for the other one, and has no part in transfers."""

    def get_handshake_metadata(self) -> Any:
        return None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        pass


KVConnectorFactory._registry["Store"] = lambda: Store


def beside_a_store(
    start: Start,
    ours: Path,
    theirs: Path,
    *,
    ours_first: bool = False,
    extra: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """An engine with a pool for each connector, whose first one is asked first; `extra` is of ours."""
    children = [
        transfer_config(Setup(), theirs) | {"kv_connector": "Store"},
        transfer_config(Setup(extra=extra or {}), ours),
    ]
    return start(**settings, transfer=multi_connector(*children[:: -1 if ours_first else 1]))
